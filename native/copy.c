/* Executes rows of copy tables: long chunks, rows of chunks, and single items, which are transposed in tiles. */
#include "kernels.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { LINE_BYTES = 64, CHUNK_STREAM_BYTES = 512 };

static inline __attribute__((always_inline)) void item_copy(uint8_t *target, const uint8_t *source, const int64_t size) {
    memcpy(target, source, (size_t)size);
}

static inline __attribute__((always_inline)) void items(uint8_t *target, int64_t target_stride, const uint8_t *source,
                                                        int64_t source_stride, int64_t count, const int64_t size) {
    for (int64_t i = 0; i < count; i++) item_copy(target + i * target_stride, source + i * source_stride, size);
}

static void scatter_items(uint8_t *target, int64_t target_stride, const uint8_t *source, int64_t source_stride, int64_t count,
                          int64_t size) {
    switch (size) {
    case 1: items(target, target_stride, source, source_stride, count, 1); break;
    case 2: items(target, target_stride, source, source_stride, count, 2); break;
    case 4: items(target, target_stride, source, source_stride, count, 4); break;
    default: items(target, target_stride, source, source_stride, count, 8);
    }
}

/* One whole, aligned cache line, past the caches where there is a way. */
static inline void put_line(uint8_t *target, const uint8_t *line, int stream) {
#if defined(__SSE2__)
    for (int i = 0; stream && i < LINE_BYTES; i += 16)
        _mm_stream_si128((__m128i *)(void *)(target + i), _mm_load_si128((const __m128i *)(const void *)(line + i)));
    if (stream) return;
#else
    (void)stream;
#endif
    memcpy(target, line, LINE_BYTES);
}

static inline void order_lines(int stream) {
#if defined(__SSE2__)
    if (stream) _mm_sfence();
#else
    (void)stream;
#endif
}

/* A block of side x side items, from lines source_stride apart to lines target_stride apart, transposed. */
#if defined(__SSE2__)
static inline __m128i load16(const uint8_t *p) { return _mm_loadu_si128((const __m128i *)(const void *)p); }
static inline void store16(uint8_t *p, __m128i v) { _mm_storeu_si128((__m128i *)(void *)p, v); }

static inline void block_8(uint8_t *t, int64_t ts, const uint8_t *s, int64_t ss) {
    __m128i a = load16(s), b = load16(s + ss);
    store16(t, _mm_unpacklo_epi64(a, b));
    store16(t + ts, _mm_unpackhi_epi64(a, b));
}

static inline void block_4(uint8_t *t, int64_t ts, const uint8_t *s, int64_t ss) {
    __m128i a = load16(s), b = load16(s + ss), c = load16(s + 2 * ss), d = load16(s + 3 * ss);
    __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
    __m128i AB = _mm_unpackhi_epi32(a, b), CD = _mm_unpackhi_epi32(c, d);
    store16(t, _mm_unpacklo_epi64(ab, cd));
    store16(t + ts, _mm_unpackhi_epi64(ab, cd));
    store16(t + 2 * ts, _mm_unpacklo_epi64(AB, CD));
    store16(t + 3 * ts, _mm_unpackhi_epi64(AB, CD));
}

static inline void block_2(uint8_t *t, int64_t ts, const uint8_t *s, int64_t ss) {
    __m128i twos[8], fours[8];
    for (int i = 0; i < 4; i++) {
        __m128i a = load16(s + 2 * i * ss), b = load16(s + (2 * i + 1) * ss);
        twos[i] = _mm_unpacklo_epi16(a, b);
        twos[i + 4] = _mm_unpackhi_epi16(a, b);
    }
    for (int half = 0; half < 8; half += 4) {
        fours[half] = _mm_unpacklo_epi32(twos[half], twos[half + 1]);
        fours[half + 1] = _mm_unpackhi_epi32(twos[half], twos[half + 1]);
        fours[half + 2] = _mm_unpacklo_epi32(twos[half + 2], twos[half + 3]);
        fours[half + 3] = _mm_unpackhi_epi32(twos[half + 2], twos[half + 3]);
    }
    for (int half = 0; half < 8; half += 4) {
        for (int i = 0; i < 2; i++) {
            store16(t + (half + 2 * i) * ts, _mm_unpacklo_epi64(fours[half + i], fours[half + i + 2]));
            store16(t + (half + 2 * i + 1) * ts, _mm_unpackhi_epi64(fours[half + i], fours[half + i + 2]));
        }
    }
}

static inline void block_1(uint8_t *t, int64_t ts, const uint8_t *s, int64_t ss) {
    __m128i twos[4], fours[4];
    for (int i = 0; i < 4; i++)
        twos[i] = _mm_unpacklo_epi8(_mm_loadl_epi64((const __m128i *)(const void *)(s + 2 * i * ss)),
                                    _mm_loadl_epi64((const __m128i *)(const void *)(s + (2 * i + 1) * ss)));
    for (int i = 0; i < 2; i++) {
        fours[i] = _mm_unpacklo_epi16(twos[2 * i], twos[2 * i + 1]);
        fours[i + 2] = _mm_unpackhi_epi16(twos[2 * i], twos[2 * i + 1]);
    }
    for (int half = 0; half < 2; half++) {
        __m128i low = _mm_unpacklo_epi32(fours[2 * half], fours[2 * half + 1]);
        __m128i high = _mm_unpackhi_epi32(fours[2 * half], fours[2 * half + 1]);
        _mm_storel_epi64((__m128i *)(void *)(t + 4 * half * ts), low);
        _mm_storel_epi64((__m128i *)(void *)(t + (4 * half + 1) * ts), _mm_unpackhi_epi64(low, low));
        _mm_storel_epi64((__m128i *)(void *)(t + (4 * half + 2) * ts), high);
        _mm_storel_epi64((__m128i *)(void *)(t + (4 * half + 3) * ts), _mm_unpackhi_epi64(high, high));
    }
}
#else
#define PLAIN_BLOCK(size, side)                                                                   \
    static inline void block_##size(uint8_t *t, int64_t ts, const uint8_t *s, int64_t ss) {       \
        for (int i = 0; i < side; i++) items(t + i * ts, size, s + i * size, ss, side, size);     \
    }
PLAIN_BLOCK(1, 8)
PLAIN_BLOCK(2, 8)
PLAIN_BLOCK(4, 4)
PLAIN_BLOCK(8, 2)
#endif

/* A square tile, one cache line wide on either side, by way of a buffer: every line of the target is written at once. */
static inline __attribute__((always_inline)) void transpose_tile(uint8_t *target, int64_t target_stride, const uint8_t *source,
                                                                 int64_t source_stride, const int64_t size, int stream) {
    const int64_t side = LINE_BYTES / size, block = size < 4 ? 8 : 16 / size;
    uint8_t buffer[LINE_BYTES * LINE_BYTES] __attribute__((aligned(64)));
    for (int64_t row = 0; row < side; row += block) {
        for (int64_t column = 0; column < side; column += block) {
            const uint8_t *from = source + row * source_stride + column * size;
            uint8_t *to = buffer + column * LINE_BYTES + row * size;
            if (size == 1) block_1(to, LINE_BYTES, from, source_stride);
            if (size == 2) block_2(to, LINE_BYTES, from, source_stride);
            if (size == 4) block_4(to, LINE_BYTES, from, source_stride);
            if (size == 8) block_8(to, LINE_BYTES, from, source_stride);
        }
    }
    for (int64_t row = 0; row < side; row++) put_line(target + row * target_stride, buffer + row * LINE_BYTES, stream);
}

/* target[i][j] = source[j][i] for i < across, j < down; both are contiguous along their last index. */
static inline __attribute__((always_inline)) void transpose(uint8_t *target, int64_t target_stride, const uint8_t *source,
                                                            int64_t source_stride, int64_t across, int64_t down,
                                                            const int64_t size) {
    const int64_t side = LINE_BYTES / size;
    int aligned = (intptr_t)target % LINE_BYTES == 0 && target_stride % LINE_BYTES == 0;
    int stream = aligned && across * down * size >= LW_STREAM_BYTES;
    int64_t whole_down = down - down % side, whole_across = across - across % side;
    for (int64_t j = 0; j < whole_down; j += side)
        for (int64_t i = 0; i < whole_across; i += side)
            transpose_tile(target + i * target_stride + j * size, target_stride, source + j * source_stride + i * size,
                           source_stride, size, stream);
    order_lines(stream);
    for (int64_t i = 0; i < across; i++) {
        int64_t j = i < whole_across ? whole_down : 0;
        items(target + i * target_stride + j * size, size, source + j * source_stride + i * size, source_stride, down - j, size);
    }
}

static void transposed(uint8_t *target, int64_t target_stride, const uint8_t *source, int64_t source_stride, int64_t across,
                       int64_t down, int64_t size) {
    switch (size) {
    case 1: transpose(target, target_stride, source, source_stride, across, down, 1); break;
    case 2: transpose(target, target_stride, source, source_stride, across, down, 2); break;
    case 4: transpose(target, target_stride, source, source_stride, across, down, 4); break;
    default: transpose(target, target_stride, source, source_stride, across, down, 8);
    }
}

void lw_gather(uint8_t *target, int64_t target_stride, const uint8_t *source, int64_t row_stride, int64_t column_stride,
               int64_t rows, int64_t columns, int64_t item_bytes) {
    if (row_stride == item_bytes && rows > 1) {
        transposed(target, target_stride, source, column_stride, rows, columns, item_bytes);
        return;
    }
    for (int64_t row = 0; row < rows; row++)
        scatter_items(target + row * target_stride, item_bytes, source + row * row_stride, column_stride, columns, item_bytes);
}

static struct lw_copy simplified(struct lw_copy c) {
    if (c.inner == 1) {
        c.inner = c.outer, c.inner_source_stride = c.outer_source_stride, c.inner_target_stride = c.outer_target_stride;
        c.outer = 1;
    }
    if (c.inner > 1 && c.inner_source_stride == c.chunk_bytes && c.inner_target_stride == c.chunk_bytes) {
        c.chunk_bytes *= c.inner;
        c.inner = c.outer, c.inner_source_stride = c.outer_source_stride, c.inner_target_stride = c.outer_target_stride;
        c.outer = 1;
    }
    return c;
}

static void copy_items(const struct lw_copy *c) {
    uint8_t *target = (uint8_t *)(intptr_t)c->target;
    const uint8_t *source = (const uint8_t *)(intptr_t)c->source;
    if (c->outer > 1 && c->outer_source_stride == c->chunk_bytes && c->inner_target_stride == c->chunk_bytes) {
        transposed(target, c->outer_target_stride, source, c->inner_source_stride, c->outer, c->inner, c->chunk_bytes);
    } else if (c->outer > 1 && c->inner_source_stride == c->chunk_bytes && c->outer_target_stride == c->chunk_bytes) {
        transposed(target, c->inner_target_stride, source, c->outer_source_stride, c->inner, c->outer, c->chunk_bytes);
    } else {
        for (int64_t i = 0; i < c->outer; i++)
            scatter_items(target + i * c->outer_target_stride, c->inner_target_stride, source + i * c->outer_source_stride,
                          c->inner_source_stride, c->inner, c->chunk_bytes);
    }
}

static void copy_chunks(const struct lw_copy *c, const struct lw_simd *simd, int stream) {
    int64_t size = c->chunk_bytes;
    stream = stream && size >= CHUNK_STREAM_BYTES;
    for (int64_t i = 0; i < c->outer; i++) {
        uint8_t *target = (uint8_t *)(intptr_t)(c->target + i * c->outer_target_stride);
        const uint8_t *source = (const uint8_t *)(intptr_t)(c->source + i * c->outer_source_stride);
        for (int64_t j = 0; j < c->inner; j++, target += c->inner_target_stride, source += c->inner_source_stride) {
            if (stream) {
                simd->stream(target, source, size);
            } else {
                memcpy(target, source, (size_t)size);
            }
        }
    }
}

void lw_copy_row(const struct lw_copy *row, const struct lw_simd *simd, int stream) {
    if (row->outer == 0 || row->inner == 0 || row->chunk_bytes == 0) return;
    struct lw_copy c = simplified(*row);
    int64_t size = c.chunk_bytes;
    if (c.inner > 1 && (size == 1 || size == 2 || size == 4 || size == 8)) {
        copy_items(&c);
    } else {
        copy_chunks(&c, simd, stream);
    }
}
