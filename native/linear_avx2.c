/* The inner work with AVX2 and FMA.
 *
 * Compiled once per number of vectors and of outputs; a sum is one chain of fused multiply-adds in the order of the inputs in all
 * of them, so they give the same bits.
 */
#include "linear.h"

#if LW_X86
#include <immintrin.h>

#define FAST static inline __attribute__((always_inline, target("avx2,fma")))
#define ENTRY static __attribute__((target("avx2,fma"), noinline))
#define UNROLL _Pragma("GCC unroll 8")

/* One input. */
FAST void add(__m256 (*sums)[LW_WIDE], const struct lw_tile *tile, int64_t at, const int vectors, const int outputs) {
    __m256 x[LW_WIDE];
    UNROLL for (int v = 0; v < vectors; v++) x[v] = _mm256_load_ps(tile->x + (at * vectors + v) * LW_VECTOR);
    UNROLL for (int output = 0; output < outputs; output++) {
        __m256 weight = _mm256_broadcast_ss((const float *)tile->weight + output * tile->stride + at);
        UNROLL for (int v = 0; v < vectors; v++) sums[output][v] = _mm256_fmadd_ps(weight, x[v], sums[output][v]);
    }
}

FAST void multiply_some(const struct lw_tile *given, float *target, const int vectors, const int outputs) {
    const struct lw_tile tile = *given;
    int64_t at = 0;
    uintptr_t next = tile.next;
    __m256 sums[LW_OUTPUTS][LW_WIDE];
    UNROLL for (int output = 0; output < outputs; output++) {
        UNROLL for (int v = 0; v < vectors; v++) sums[output][v] = _mm256_setzero_ps();
    }
    for (; at + LW_STRETCH <= tile.inputs; at += LW_STRETCH) {
        for (int line = 0; line < tile.lines; line++, next += LW_LINE) _mm_prefetch((const char *)next, _MM_HINT_T1);
        _Pragma("GCC unroll 4") for (int i = 0; i < LW_STRETCH; i++) add(sums, &tile, at + i, vectors, outputs);
    }
    for (; at < tile.inputs; at++) add(sums, &tile, at, vectors, outputs);
    UNROLL for (int output = 0; output < outputs; output++) {
        UNROLL for (int v = 0; v < vectors; v++)
            _mm256_storeu_ps(target + (output * LW_WIDE + v) * LW_VECTOR, sums[output][v]);
    }
}

/* Two inputs of bfloat16 in one load: the first is its lower half. */
FAST void add_pair(__m256 *sums, const struct lw_tile *tile, int64_t at, const int outputs) {
    const __m256i upper = _mm256_set1_epi32(-65536);
    __m256 first = _mm256_load_ps(tile->x + at * LW_VECTOR), second = _mm256_load_ps(tile->x + (at + 1) * LW_VECTOR);
    UNROLL for (int output = 0; output < outputs; output++) {
        const void *place = (const uint16_t *)tile->weight + output * tile->stride + at;
        __m256i pair = _mm256_castps_si256(_mm256_broadcast_ss(place));
        sums[output] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), first, sums[output]);
        sums[output] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(pair, upper)), second, sums[output]);
    }
}

FAST void multiply_pairs(const struct lw_tile *given, float *target, const int outputs) {
    const struct lw_tile tile = *given;
    int64_t at = 0;
    uintptr_t next = tile.next;
    __m256 sums[LW_OUTPUTS];
    UNROLL for (int output = 0; output < outputs; output++) sums[output] = _mm256_setzero_ps();
    for (; at + LW_STRETCH <= tile.inputs; at += LW_STRETCH) {
        for (int line = 0; line < tile.lines; line++, next += LW_LINE) _mm_prefetch((const char *)next, _MM_HINT_T1);
        for (int i = 0; i < LW_STRETCH; i += 2) add_pair(sums, &tile, at + i, outputs);
    }
    for (; at + 2 <= tile.inputs; at += 2) add_pair(sums, &tile, at, outputs);
    UNROLL for (int output = 0; output < outputs; output++) {
        if (at < tile.inputs) {
            float last = lw_widened(((const uint16_t *)tile.weight)[output * tile.stride + at]);
            sums[output] = _mm256_fmadd_ps(_mm256_set1_ps(last), _mm256_load_ps(tile.x + at * LW_VECTOR), sums[output]);
        }
        _mm256_storeu_ps(target + output * LW_WIDE * LW_VECTOR, sums[output]);
    }
}

ENTRY void multiply_half(const struct lw_tile *tile, float *sums) {
    switch (tile->outputs) {
        case 1: multiply_pairs(tile, sums, 1); break;
        case 2: multiply_pairs(tile, sums, 2); break;
        case 3: multiply_pairs(tile, sums, 3); break;
        case 4: multiply_pairs(tile, sums, 4); break;
        case 5: multiply_pairs(tile, sums, 5); break;
        case 6: multiply_pairs(tile, sums, 6); break;
        case 7: multiply_pairs(tile, sums, 7); break;
        default: multiply_pairs(tile, sums, 8); break;
    }
}

ENTRY void multiply_narrow(const struct lw_tile *tile, float *sums) {
    switch (tile->outputs) {
        case 1: multiply_some(tile, sums, 1, 1); break;
        case 2: multiply_some(tile, sums, 1, 2); break;
        case 3: multiply_some(tile, sums, 1, 3); break;
        case 4: multiply_some(tile, sums, 1, 4); break;
        case 5: multiply_some(tile, sums, 1, 5); break;
        case 6: multiply_some(tile, sums, 1, 6); break;
        case 7: multiply_some(tile, sums, 1, 7); break;
        default: multiply_some(tile, sums, 1, 8); break;
    }
}

ENTRY void multiply_wide(const struct lw_tile *tile, float *sums) {
    switch (tile->outputs) {
        case 1: multiply_some(tile, sums, 2, 1); break;
        case 2: multiply_some(tile, sums, 2, 2); break;
        case 3: multiply_some(tile, sums, 2, 3); break;
        case 4: multiply_some(tile, sums, 2, 4); break;
        case 5: multiply_some(tile, sums, 2, 5); break;
        default: multiply_some(tile, sums, 2, 6); break;
    }
}

static void multiply(const struct lw_tile *tile, float *sums) {
    if (tile->half) {
        multiply_half(tile, sums);
    } else if (tile->vectors == 1) {
        multiply_narrow(tile, sums);
    } else {
        multiply_wide(tile, sums);
    }
}

ENTRY void widen(float *target, const uint16_t *source, int64_t count) {
    int64_t i = 0;
    for (; i + LW_VECTOR <= count; i += LW_VECTOR) {
        __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(source + i)));
        _mm256_storeu_si256((__m256i *)(void *)(target + i), _mm256_slli_epi32(wide, 16));
    }
    for (; i < count; i++) target[i] = lw_widened(source[i]);
}

const struct lw_linear_simd lw_linear_avx2 = {"avx2", multiply, widen};
#endif
