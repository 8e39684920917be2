/* The inner work with AVX2: pmaddwd multiplies sixteen units by their weights and adds them in pairs, mod 2^32.
 *
 * Every function is compiled once per combination of the constants it is called with. Ends of lines go through small zeroed
 * buffers, so that there is one way to do the arithmetic.
 */
#include "kernels.h"

#if LW_X86
#include <immintrin.h>
#include <string.h>

#define FAST static inline __attribute__((always_inline, target("avx2,f16c")))
#define ENTRY static __attribute__((target("avx2,f16c"), noinline))

enum { STEP_BYTES = 32, LINE_BYTES = 64, GROUP = 4, TURN_BYTES = 512, WIDE_UNITS = 4096 };

/* How far the prefetches run ahead, as measured: lines that are only read have others beside them. */
enum { AHEAD_BYTES = 256, AHEAD_MOVING_BYTES = 2048 };

FAST __m256i load(const void *address) { return _mm256_loadu_si256((const __m256i *)address); }

FAST __m256i rounded(__m256i bits) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(bits), _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(sum, _mm256_set1_epi32(0x7FC00000), nan), 16);
}

FAST __m256i halved(const uint8_t *source) {
    __m256 low = _mm256_loadu_ps((const float *)(const void *)source);
    __m256 high = _mm256_loadu_ps((const float *)(const void *)(source + 32));
    __m256i halves = _mm256_set_m128i(_mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT), _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT));
    __m256i size = _mm256_and_si256(halves, _mm256_set1_epi16(0x7FFF));
    __m256i nan = _mm256_cmpgt_epi16(size, _mm256_set1_epi16(0x7C00));
    return _mm256_blendv_epi8(halves, _mm256_set1_epi16(0x7E00), nan);
}

/* 32 bytes of target items. */
FAST __m256i fetch(const uint8_t *source, const int cast) {
    if (cast == LW_CAST_BFLOAT16)
        return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(load(source)), rounded(load(source + 32))), 0xD8);
    return cast == LW_CAST_FLOAT16 ? halved(source) : load(source);
}

FAST void put(uint8_t *target, __m256i value, const int stream) {
    if (stream) {
        _mm256_stream_si256((__m256i *)(void *)target, value);
    } else {
        _mm256_storeu_si256((__m256i *)(void *)target, value);
    }
}

FAST __m256i low_units(__m256i bytes) { return _mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)); }
FAST __m256i high_units(__m256i bytes) { return _mm256_cvtepu8_epi16(_mm256_extracti128_si256(bytes, 1)); }

FAST void gain(__m256i *sum, __m256i units, __m256i weights) {
    *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(units, weights));
}

/* The sums of one line, for the four seeds. A value: arrays would be kept in memory. */
typedef struct {
    __m256i a, b, c, d;
} sums4;

FAST sums4 nothing(void) {
    __m256i zero = _mm256_setzero_si256();
    return (sums4){zero, zero, zero, zero};
}

/* Adds the products of sixteen units of one or two lines; the weights are loaded once for both. */
FAST void weigh(sums4 *one, __m256i x, sums4 *two, __m256i y, const int16_t *at, size_t stride) {
    __m256i weights = load(at);
    gain(&one->a, x, weights);
    if (two != NULL) gain(&two->a, y, weights);
    weights = load(at + stride);
    gain(&one->b, x, weights);
    if (two != NULL) gain(&two->b, y, weights);
    weights = load(at + 2 * stride);
    gain(&one->c, x, weights);
    if (two != NULL) gain(&two->c, y, weights);
    weights = load(at + 3 * stride);
    gain(&one->d, x, weights);
    if (two != NULL) gain(&two->d, y, weights);
}

FAST void weigh_bytes(sums4 *one, __m256i x, sums4 *two, __m256i y, const int16_t *at, size_t stride, const int unit_bytes) {
    if (unit_bytes == 2) {
        weigh(one, x, two, y, at, stride);
    } else {
        weigh(one, low_units(x), two, low_units(y), at, stride);
        weigh(one, high_units(x), two, high_units(y), at + 16, stride);
    }
}

/* What the constants of a variant say. */
struct how {
    int unit_bytes, cast, moves, stream, digests;
};

FAST void add_line(__m256i total[LW_SEEDS], sums4 sums, int64_t row) {
    __m256i by_seed[LW_SEEDS] = {sums.a, sums.b, sums.c, sums.d};
    for (int seed = 0; seed < LW_SEEDS; seed++) {
        __m256i weight = _mm256_set1_epi32((int32_t)lw_row_weight(seed, row));
        total[seed] = _mm256_add_epi32(total[seed], _mm256_mullo_epi32(by_seed[seed], weight));
    }
}

FAST void ahead(const uint8_t *source, const struct how how) {
    const char *soon = (const char *)source + (how.moves ? AHEAD_MOVING_BYTES : AHEAD_BYTES);
    _mm_prefetch(soon, _MM_HINT_T0);
    if (how.cast) _mm_prefetch(soon + LINE_BYTES, _MM_HINT_T0);
}

/* A position in a line, and what was summed up to it. */
struct cursor {
    const uint8_t *source;
    uint8_t *target;
    sums4 sums;
};

/* The next `units` units of one line or two, whole steps: a cache line of each target at a time. */
FAST void steps(struct cursor *one, struct cursor *two, int64_t units, const int16_t *weights, size_t stride,
                const struct how how) {
    const int64_t step = STEP_BYTES / how.unit_bytes, step_source = how.cast ? 2 * STEP_BYTES : STEP_BYTES;
    const uint8_t *source = one->source, *source2 = two ? two->source : NULL;
    uint8_t *target = one->target, *target2 = two ? two->target : NULL;
    sums4 sums = one->sums, sums2 = two ? two->sums : nothing();
    for (const int16_t *end = weights + units; weights < end; weights += 2 * step) {
        __m256i x = fetch(source, how.cast), x2 = fetch(source + step_source, how.cast), y = x, y2 = x2;
        ahead(source, how);
        source += 2 * step_source;
        if (how.moves) put(target, x, how.stream), put(target + STEP_BYTES, x2, how.stream), target += 2 * STEP_BYTES;
        if (two) {
            y = fetch(source2, how.cast), y2 = fetch(source2 + step_source, how.cast);
            ahead(source2, how);
            source2 += 2 * step_source;
            if (how.moves) put(target2, y, how.stream), put(target2 + STEP_BYTES, y2, how.stream), target2 += 2 * STEP_BYTES;
        }
        if (how.digests) {
            weigh_bytes(&sums, x, two ? &sums2 : NULL, y, weights, stride, how.unit_bytes);
            weigh_bytes(&sums, x2, two ? &sums2 : NULL, y2, weights + step, stride, how.unit_bytes);
        }
    }
    *one = (struct cursor){source, target, sums};
    if (two) *two = (struct cursor){source2, target2, sums2};
}

/* Few units, at the head or the tail of a line, by way of zeroed buffers. */
FAST void part(struct cursor *at, int64_t units, const int16_t *weights, size_t stride, const struct how how) {
    const int64_t step = STEP_BYTES / how.unit_bytes;
    for (int64_t now; units > 0; units -= now, weights += now) {
        uint8_t in[2 * STEP_BYTES] = {0}, out[STEP_BYTES];
        now = lw_least(units, step);
        memcpy(in, at->source, (size_t)(now * (how.cast ? 4 : how.unit_bytes)));
        __m256i bytes = fetch(in, how.cast);
        at->source += now * (how.cast ? 4 : how.unit_bytes);
        if (how.digests) weigh_bytes(&at->sums, bytes, NULL, bytes, weights, stride, how.unit_bytes);
        if (!how.moves) continue;
        put(out, bytes, 0);
        memcpy(at->target, out, (size_t)(now * how.unit_bytes));
        at->target += now * how.unit_bytes;
    }
}

/* `count` lines together, in turns. Memory is read fastest as several streams, and a pair of lines shares its weights. */
FAST void group(const struct lw_lines *l, int64_t row, const int count, __m256i total[LW_SEEDS], const struct how how) {
    const int64_t round = 2 * STEP_BYTES / how.unit_bytes, turn = TURN_BYTES / how.unit_bytes;
    struct cursor at[GROUP];
    int64_t head = 0;
    for (int line = 0; line < count; line++)
        at[line] = (struct cursor){l->source + (row + line) * l->source_stride,
                                   how.moves ? l->target + (row + line) * l->target_stride : NULL, nothing()};
    const int16_t *weights = l->weights.first;
    if (how.stream) head = lw_least((int64_t)(-(uintptr_t)at[0].target & (LINE_BYTES - 1)) / how.unit_bytes, l->units);
    for (int line = 0; head && line < count; line++) part(&at[line], head, weights, l->weights.stride, how);
    weights += head;
    int64_t rest = (l->units - head) % round;
    for (int64_t left = l->units - head - rest, units; left > 0; left -= units, weights += units) {
        units = lw_least(left, turn);
        for (int line = 0; line < count; line += 2)
            steps(&at[line], count > 1 ? &at[line + 1] : NULL, units, weights, l->weights.stride, how);
    }
    for (int line = 0; line < count; line++) {
        part(&at[line], rest, weights, l->weights.stride, how);
        if (how.digests) add_line(total, at[line].sums, l->row_first + (row + line) * l->row_step);
    }
}

FAST void all(const struct lw_lines *l, uint32_t *result, const struct how how) {
    __m256i total[LW_SEEDS];
    for (int seed = 0; seed < LW_SEEDS; seed++) total[seed] = _mm256_setzero_si256();
    int64_t row = 0;
    /* What is written goes line by line: stores past the caches want one stream. So do short lines: several streams that end soon
     * leave the prefetcher behind. */
    if (!how.moves && l->units >= WIDE_UNITS)
        for (; row + GROUP <= l->rows; row += GROUP) group(l, row, GROUP, total, how);
    for (; row < l->rows; row++) group(l, row, 1, total, how);
    for (int seed = 0; how.digests && seed < LW_SEEDS; seed++) {
        uint32_t lanes[8];
        _mm256_storeu_si256((__m256i *)(void *)lanes, total[seed]);
        for (int lane = 0; lane < 8; lane++) result[seed] += lanes[lane];
    }
}

#define VARIANT(name, unit_bytes, cast, moves, stream, digests)                 \
    ENTRY void name(const struct lw_lines *l, uint32_t *result) {               \
        all(l, result, (struct how){unit_bytes, cast, moves, stream, digests});\
    }
VARIANT(digest_bytes, 1, 0, 0, 0, 1)
VARIANT(digest_words, 2, 0, 0, 0, 1)
VARIANT(freeze_bytes, 1, 0, 1, 0, 1)
VARIANT(freeze_words, 2, 0, 1, 0, 1)
VARIANT(freeze_bfloat16, 2, 1, 1, 0, 1)
VARIANT(freeze_float16, 2, 2, 1, 0, 1)
VARIANT(stream_bytes, 1, 0, 1, 1, 1)
VARIANT(stream_words, 2, 0, 1, 1, 1)
VARIANT(stream_bfloat16, 2, 1, 1, 1, 1)
VARIANT(stream_float16, 2, 2, 1, 1, 1)
VARIANT(move_bytes, 1, 0, 1, 0, 0)
VARIANT(move_bfloat16, 2, 1, 1, 0, 0)
VARIANT(move_float16, 2, 2, 1, 0, 0)
VARIANT(pass_bytes, 1, 0, 1, 1, 0)
VARIANT(pass_bfloat16, 2, 1, 1, 1, 0)
VARIANT(pass_float16, 2, 2, 1, 1, 0)

typedef void (*variant)(const struct lw_lines *, uint32_t *);

/* By [stream][unit and cast]: bytes, words, words cast to bfloat16, to float16. */
static const variant FREEZES[2][4] = {{freeze_bytes, freeze_words, freeze_bfloat16, freeze_float16},
                                      {stream_bytes, stream_words, stream_bfloat16, stream_float16}};
static const variant MOVES[2][4] = {{move_bytes, move_bytes, move_bfloat16, move_float16},
                                    {pass_bytes, pass_bytes, pass_bfloat16, pass_float16}};

static void lines(const struct lw_lines *given, uint32_t sums[LW_SEEDS]) {
    struct lw_lines l = *given;
    int kind = l.cast ? l.cast + 1 : l.unit_bytes - 1;
    if (l.target == NULL) {
        (kind ? digest_words : digest_bytes)(&l, sums);
        return;
    }
    int stream = l.stream && (intptr_t)l.target % l.unit_bytes == 0 && l.target_stride % l.unit_bytes == 0;
    if (l.digests) {
        FREEZES[stream][kind](&l, sums);
        return;
    }
    if (kind == 1) { /* bytes that are only moved have no units */
        l.units *= 2;
        l.unit_bytes = 1;
    }
    MOVES[stream][kind](&l, sums);
}

enum { PAIRS = 4 };

/* Of four pairs of unit columns, the units of consecutive rows, paired as pmaddwd wants them: sixteen rows, eight of 8 bytes. */
FAST void pair_up(const uint8_t *const line[2 * PAIRS], int64_t offset, __m256i low[PAIRS], __m256i high[PAIRS], const int item) {
    for (int pair = 0; pair < PAIRS; pair++) {
        if (item >= 4) {
            low[pair] = load(line[pair] + offset);
            high[pair] = load(line[pair] + offset + 32);
            continue;
        }
        __m256i first, second;
        if (item == 2) {
            first = load(line[2 * pair] + offset);
            second = load(line[2 * pair + 1] + offset);
        } else {
            first = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(line[2 * pair] + offset)));
            second = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)(line[2 * pair + 1] + offset)));
        }
        low[pair] = _mm256_unpacklo_epi16(first, second);
        high[pair] = _mm256_unpackhi_epi16(first, second);
    }
}

FAST void gain_rows(struct lw_scratch *scratch, int64_t lane, const uint8_t *const line[2 * PAIRS], int64_t offset,
                    const int64_t weights[LW_SEEDS][PAIRS], const int item) {
    __m256i low[PAIRS], high[PAIRS];
    pair_up(line, offset, low, high, item);
    for (int seed = 0; seed < LW_SEEDS; seed++) {
        __m256i *at = (__m256i *)(void *)&scratch->lanes[seed][lane];
        __m256i below = _mm256_load_si256(at), above = _mm256_load_si256(at + 1);
        for (int pair = 0; pair < PAIRS; pair++) {
            __m256i weight = _mm256_set1_epi64x(weights[seed][pair]);
            gain(&below, low[pair], weight);
            gain(&above, high[pair], weight);
        }
        _mm256_store_si256(at, below);
        _mm256_store_si256(at + 1, above);
    }
}

/* The weights of four pairs, zero where the columns have ended; a pair is repeated to fill 64 bits. */
FAST void pair_weights(int64_t result[LW_SEEDS][PAIRS], struct lw_weights weights, int64_t column, int64_t columns, const int item) {
    int64_t units = item < 2 ? 1 : item / 2, per_pair = item == 8 ? 4 : 2;
    int64_t left = (columns - column) * units;
    for (int seed = 0; seed < LW_SEEDS; seed++) {
        int16_t padded[PAIRS][4] = {{0}};
        const int16_t *from = weights.first + (size_t)seed * weights.stride + column * units;
        for (int64_t i = 0; i < lw_least(left, PAIRS * per_pair); i++) {
            padded[i / per_pair][i % per_pair] = from[i];
            if (per_pair == 2) padded[i / 2][i % 2 + 2] = from[i];
        }
        memcpy(result[seed], padded, sizeof padded);
    }
}

FAST void finish_tile(const struct lw_columns *c, int64_t top, int64_t rows, struct lw_scratch *scratch,
                      uint32_t sums[LW_SEEDS], const int item) {
    static const uint8_t order[16] = {0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15}; /* where unpacking puts a row */
    for (int64_t row = 0; row < rows; row++) {
        int64_t lane = item >= 4 ? row : (row & ~(int64_t)15) + order[row & 15];
        for (int seed = 0; seed < LW_SEEDS; seed++) {
            const uint32_t *lanes = scratch->lanes[seed];
            uint32_t sum = item == 8 ? lanes[2 * lane] + lanes[2 * lane + 1] : lanes[lane];
            sums[seed] += sum * lw_row_weight(seed, c->row_first + (top + row) * c->row_step);
        }
    }
}

FAST void tile(const struct lw_columns *c, int64_t top, int64_t rows, struct lw_scratch *scratch, const int item) {
    const int64_t group = item >= 4 ? PAIRS : 2 * PAIRS, step = item == 8 ? 8 : 16, lanes_per_row = item == 8 ? 2 : 1;
    for (int64_t column = 0; column < c->columns; column += group) {
        const uint8_t *line[2 * PAIRS];
        int64_t weights[LW_SEEDS][PAIRS];
        uint8_t ends[2 * PAIRS][64];
        for (int64_t i = 0; i < 2 * PAIRS; i++) {
            int64_t number = lw_least(column + lw_least(i, group - 1), c->columns - 1);
            line[i] = c->source + number * c->column_stride + top * item;
        }
        pair_weights(weights, c->weights, column, c->columns, item);
        int64_t row = 0, next = lw_least(group, c->columns - 1 - column) * c->column_stride;
        for (; row + step <= rows; row += step) {
            for (int64_t i = 0; i < group; i++) _mm_prefetch((const char *)(line[i] + next + row * item), _MM_HINT_T0);
            gain_rows(scratch, row * lanes_per_row, line, row * item, (const int64_t(*)[PAIRS])weights, item);
        }
        if (row == rows) continue;
        memset(ends, 0, sizeof ends);
        for (int64_t i = 0; i < group; i++) {
            memcpy(ends[i], line[i] + row * item, (size_t)((rows - row) * item));
            line[i] = ends[i];
        }
        gain_rows(scratch, row * lanes_per_row, line, 0, (const int64_t(*)[PAIRS])weights, item);
    }
}

FAST void all_columns(const struct lw_columns *c, struct lw_scratch *scratch, uint32_t *sums, const int item) {
    const int64_t height = item == 8 ? LW_LANES / 2 : LW_LANES;
    for (int64_t top = 0; top < c->rows; top += height) {
        int64_t rows = lw_least(height, c->rows - top);
        memset(scratch->lanes, 0, sizeof scratch->lanes);
        tile(c, top, rows, scratch, item);
        finish_tile(c, top, rows, scratch, sums, item);
    }
}

ENTRY void columns_1(const struct lw_columns *c, struct lw_scratch *scratch, uint32_t *sums) { all_columns(c, scratch, sums, 1); }
ENTRY void columns_2(const struct lw_columns *c, struct lw_scratch *scratch, uint32_t *sums) { all_columns(c, scratch, sums, 2); }
ENTRY void columns_4(const struct lw_columns *c, struct lw_scratch *scratch, uint32_t *sums) { all_columns(c, scratch, sums, 4); }
ENTRY void columns_8(const struct lw_columns *c, struct lw_scratch *scratch, uint32_t *sums) { all_columns(c, scratch, sums, 8); }

static void columns(const struct lw_columns *c, struct lw_scratch *scratch, uint32_t sums[LW_SEEDS]) {
    switch (c->item_bytes) {
    case 1: columns_1(c, scratch, sums); break;
    case 2: columns_2(c, scratch, sums); break;
    case 4: columns_4(c, scratch, sums); break;
    default: columns_8(c, scratch, sums);
    }
}

ENTRY void stream(uint8_t *target, const uint8_t *source, int64_t size) {
    int64_t at = lw_least((int64_t)(-(uintptr_t)target & (STEP_BYTES - 1)), size);
    memcpy(target, source, (size_t)at);
    for (; at + 4 * STEP_BYTES <= size; at += 4 * STEP_BYTES) {
        _mm_prefetch((const char *)(source + at + AHEAD_BYTES), _MM_HINT_T0);
        _mm_prefetch((const char *)(source + at + AHEAD_BYTES + 64), _MM_HINT_T0);
        for (int i = 0; i < 4; i++) put(target + at + i * STEP_BYTES, load(source + at + i * STEP_BYTES), 1);
    }
    memcpy(target + at, source + at, (size_t)(size - at));
}

static void fence(void) { _mm_sfence(); }

const struct lw_simd lw_avx2 = {"avx2", lines, columns, stream, fence};

const struct lw_simd *lw_best(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &lw_avx2 : &lw_portable;
}
#else
const struct lw_simd *lw_best(void) { return &lw_portable; }
#endif
