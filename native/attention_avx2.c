/* The inner work with AVX2 and FMA.
 *
 * score and mix are compiled once per number of queries and of vectors; a query's sum is one chain of fused multiply-adds in the
 * order of dimensions or positions in all of them, so they give the same bits.
 */
#include "attention.h"

#if LW_X86
#include <immintrin.h>
#include <math.h>

#define FAST static inline __attribute__((always_inline, target("avx2,fma")))
#define ENTRY static __attribute__((target("avx2,fma"), noinline))
#define UNROLL _Pragma("GCC unroll 8")

/* e^x for x <= 0: 2^n e^r with |r| <= ln 2 / 2. Zero where it would be denormal; NaN stays NaN. */
FAST __m256 exponential(__m256 x) {
    const __m256 lowest = _mm256_set1_ps(-87.33654f);
    __m256 gone = _mm256_cmp_ps(x, lowest, _CMP_LT_OQ);
    x = _mm256_max_ps(lowest, x);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_fmadd_ps(y, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1.0f)));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_andnot_ps(gone, _mm256_mul_ps(y, _mm256_castsi256_ps(power)));
}

FAST __m256 fetch(const void *items, int64_t at, const int half) {
    if (!half) return _mm256_loadu_ps((const float *)items + at);
    __m128i halves = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)items + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

FAST float first_of(__m256 x) { return _mm256_cvtss_f32(x); }

FAST float highest_of(__m256 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

FAST float sum_of(__m256 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

FAST void score_some(const float *queries, const void *const *keys, int64_t stride, int64_t dim, float *scores, const int rows,
                     const int vectors, const int half) {
    __m256 sums[LW_GROUP][LW_VECTOR];
    UNROLL for (int row = 0; row < rows; row++) {
        UNROLL for (int v = 0; v < vectors; v++) sums[row][v] = _mm256_setzero_ps();
    }
    for (int64_t d = 0; d < dim; d++) {
        __m256 key[LW_VECTOR];
        UNROLL for (int v = 0; v < vectors; v++) key[v] = fetch(keys[v], d * stride, half);
        UNROLL for (int row = 0; row < rows; row++) {
            __m256 query = _mm256_broadcast_ss(queries + d * rows + row);
            UNROLL for (int v = 0; v < vectors; v++) sums[row][v] = _mm256_fmadd_ps(query, key[v], sums[row][v]);
        }
    }
    UNROLL for (int row = 0; row < rows; row++) {
        UNROLL for (int v = 0; v < vectors; v++) _mm256_storeu_ps(scores + row * LW_CHUNK + v * LW_VECTOR, sums[row][v]);
    }
}

/* `wide` vectors at a time, as many as registers hold; then halves of it. */
FAST void score_rows(const float *queries, const struct lw_chunk *chunk, int64_t vectors, int64_t dim, float *scores,
                     const int rows, const int wide, const int half) {
    int64_t at = 0, stride = chunk->key_stride;
    for (; vectors - at >= wide; at += wide)
        score_some(queries, chunk->keys + at, stride, dim, scores + at * LW_VECTOR, rows, wide, half);
    if (wide > 4 && vectors - at >= 4) {
        score_some(queries, chunk->keys + at, stride, dim, scores + at * LW_VECTOR, rows, 4, half);
        at += 4;
    }
    if (wide > 2 && vectors - at >= 2) {
        score_some(queries, chunk->keys + at, stride, dim, scores + at * LW_VECTOR, rows, 2, half);
        at += 2;
    }
    if (vectors - at >= 1) score_some(queries, chunk->keys + at, stride, dim, scores + at * LW_VECTOR, rows, 1, half);
}

FAST void score_of(const float *queries, int rows, const struct lw_chunk *chunk, int64_t vectors, int64_t dim, float *scores,
                   const int half) {
    switch (rows) {
        case 1: score_rows(queries, chunk, vectors, dim, scores, 1, 8, half); break;
        case 2: score_rows(queries, chunk, vectors, dim, scores, 2, 4, half); break;
        case 3: score_rows(queries, chunk, vectors, dim, scores, 3, 4, half); break;
        case 4: score_rows(queries, chunk, vectors, dim, scores, 4, 2, half); break;
        case 5: score_rows(queries, chunk, vectors, dim, scores, 5, 2, half); break;
        default: score_rows(queries, chunk, vectors, dim, scores, 6, 2, half); break;
    }
}

ENTRY void score(const float *queries, int rows, const struct lw_chunk *chunk, int64_t vectors, int64_t dim, float *scores) {
    if (chunk->half) {
        score_of(queries, rows, chunk, vectors, dim, scores, 1);
    } else {
        score_of(queries, rows, chunk, vectors, dim, scores, 0);
    }
}

ENTRY float weigh(float *scores, int64_t count, struct lw_softmax *softmax) {
    int64_t vectors = (count + LW_VECTOR - 1) / LW_VECTOR;
    for (int64_t i = count; i < vectors * LW_VECTOR; i++) scores[i] = -INFINITY;
    __m256 high = _mm256_set1_ps(softmax->highest), sum = _mm256_setzero_ps();
    for (int64_t v = 0; v < vectors; v++) high = _mm256_max_ps(high, _mm256_loadu_ps(scores + v * LW_VECTOR));
    float highest = highest_of(high);
    high = _mm256_set1_ps(highest);
    for (int64_t v = 0; v < vectors; v++) {
        __m256 weight = exponential(_mm256_sub_ps(_mm256_loadu_ps(scores + v * LW_VECTOR), high));
        _mm256_storeu_ps(scores + v * LW_VECTOR, weight);
        sum = _mm256_add_ps(sum, weight);
    }
    float by = first_of(exponential(_mm256_sub_ps(_mm256_set1_ps(softmax->highest), high)));
    softmax->sum = softmax->sum * by + sum_of(sum);
    softmax->highest = highest;
    return by;
}

FAST void mix_some(const float *weights, const struct lw_chunk *chunk, int64_t first, int64_t last, int64_t at, int64_t dim,
                   float *target, const int rows, const int vectors, const int half) {
    __m256 sums[LW_GROUP][LW_VECTOR];
    UNROLL for (int row = 0; row < rows; row++) {
        UNROLL for (int v = 0; v < vectors; v++) sums[row][v] = _mm256_loadu_ps(target + row * dim + at + v * LW_VECTOR);
    }
    for (int64_t i = first; i < last; i++) {
        const void *line = chunk->values[i];
        __m256 value[LW_VECTOR];
        UNROLL for (int v = 0; v < vectors; v++) value[v] = fetch(line, at + v * LW_VECTOR, half);
        UNROLL for (int row = 0; row < rows; row++) {
            __m256 weight = _mm256_broadcast_ss(weights + row * LW_CHUNK + i);
            UNROLL for (int v = 0; v < vectors; v++) sums[row][v] = _mm256_fmadd_ps(weight, value[v], sums[row][v]);
        }
    }
    UNROLL for (int row = 0; row < rows; row++) {
        UNROLL for (int v = 0; v < vectors; v++) _mm256_storeu_ps(target + row * dim + at + v * LW_VECTOR, sums[row][v]);
    }
}

FAST void mix_rows(const float *weights, const struct lw_chunk *chunk, int64_t first, int64_t last, int64_t dim, float *sums,
                   const int rows, const int wide, const int half) {
    int64_t at = 0;
    for (; dim - at >= wide * LW_VECTOR; at += wide * LW_VECTOR)
        mix_some(weights, chunk, first, last, at, dim, sums, rows, wide, half);
    if (wide > 4 && dim - at >= 4 * LW_VECTOR) {
        mix_some(weights, chunk, first, last, at, dim, sums, rows, 4, half);
        at += 4 * LW_VECTOR;
    }
    if (wide > 2 && dim - at >= 2 * LW_VECTOR) {
        mix_some(weights, chunk, first, last, at, dim, sums, rows, 2, half);
        at += 2 * LW_VECTOR;
    }
    if (dim - at >= LW_VECTOR) mix_some(weights, chunk, first, last, at, dim, sums, rows, 1, half);
}

FAST void mix_of(const float *weights, int rows, const struct lw_chunk *chunk, int64_t first, int64_t last, int64_t dim,
                 float *sums, const int half) {
    switch (rows) {
        case 1: mix_rows(weights, chunk, first, last, dim, sums, 1, 8, half); break;
        case 2: mix_rows(weights, chunk, first, last, dim, sums, 2, 4, half); break;
        case 3: mix_rows(weights, chunk, first, last, dim, sums, 3, 2, half); break;
        case 4: mix_rows(weights, chunk, first, last, dim, sums, 4, 2, half); break;
        case 5: mix_rows(weights, chunk, first, last, dim, sums, 5, 2, half); break;
        default: mix_rows(weights, chunk, first, last, dim, sums, 6, 2, half); break;
    }
}

ENTRY void mix(const float *weights, int rows, const struct lw_chunk *chunk, int64_t first, int64_t last, int64_t dim,
               float *sums) {
    if (chunk->half) {
        mix_of(weights, rows, chunk, first, last, dim, sums, 1);
    } else {
        mix_of(weights, rows, chunk, first, last, dim, sums, 0);
    }
}

ENTRY void widen(float *target, int64_t target_stride, const uint16_t *source, int64_t source_stride, int64_t rows,
                 int64_t columns) {
    for (int64_t row = 0; row < rows; row++, target += target_stride, source += source_stride) {
        int64_t i = 0;
        for (; i + LW_VECTOR <= columns; i += LW_VECTOR) {
            __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(source + i)));
            _mm256_storeu_si256((__m256i *)(void *)(target + i), _mm256_slli_epi32(wide, 16));
        }
        for (; i < columns; i++) target[i] = lw_widened(source[i]);
    }
}

const struct lw_attention_simd lw_attention_avx2 = {"avx2", LW_VECTOR, 1, score, weigh, mix, widen};
#endif
