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

/* The weight's item at `at` in every lane. An item of bfloat16 is the lower or the upper half of what is loaded: the item before
 * it is there whenever `upper` is asked for, the one behind it whenever it is not. */
FAST __m256 spread(const void *weight, int64_t at, const int half, const int upper) {
    if (!half) return _mm256_broadcast_ss((const float *)weight + at);
    const void *place = (const uint16_t *)weight + at - upper;
    __m256i pair = _mm256_castps_si256(_mm256_broadcast_ss(place));
    return _mm256_castsi256_ps(upper ? _mm256_and_si256(pair, _mm256_set1_epi32(-65536)) : _mm256_slli_epi32(pair, 16));
}

/* One input. */
FAST void add(__m256 (*sums)[LW_WIDE], const struct lw_tile *tile, int64_t at, const int vectors, const int outputs,
              const int half, const int upper) {
    __m256 x[LW_WIDE];
    if (half) __asm__ volatile("" ::: "memory"); /* loads a pair again rather than to run out of registers */
    UNROLL for (int v = 0; v < vectors; v++) x[v] = _mm256_load_ps(tile->x + (at * vectors + v) * LW_VECTOR);
    UNROLL for (int output = 0; output < outputs; output++) {
        __m256 weight = spread(tile->weight, output * tile->inputs + at, half, upper);
        UNROLL for (int v = 0; v < vectors; v++) sums[output][v] = _mm256_fmadd_ps(weight, x[v], sums[output][v]);
    }
}

/* The last of an odd number of inputs: nothing lies behind the weight's end. */
FAST void add_last(__m256 (*sums)[LW_WIDE], const struct lw_tile *tile, const int vectors, const int outputs, const int half) {
    int64_t at = tile->inputs - 1;
    UNROLL for (int output = 0; output < outputs; output++) {
        int64_t place = output * tile->inputs + at;
        float item = half ? lw_widened(((const uint16_t *)tile->weight)[place]) : ((const float *)tile->weight)[place];
        UNROLL for (int v = 0; v < vectors; v++) {
            __m256 x = _mm256_load_ps(tile->x + (at * vectors + v) * LW_VECTOR);
            sums[output][v] = _mm256_fmadd_ps(_mm256_set1_ps(item), x, sums[output][v]);
        }
    }
}

FAST void multiply_some(const struct lw_tile *given, float *target, const int vectors, const int outputs, const int half) {
    const struct lw_tile tile = *given;
    int64_t at = 0;
    uintptr_t next = tile.next;
    __m256 sums[LW_OUTPUTS][LW_WIDE];
    UNROLL for (int output = 0; output < outputs; output++) {
        UNROLL for (int v = 0; v < vectors; v++) sums[output][v] = _mm256_setzero_ps();
    }
    for (; at + LW_STRETCH <= tile.inputs; at += LW_STRETCH) {
        for (int line = 0; line < tile.lines; line++, next += LW_LINE) _mm_prefetch((const char *)next, _MM_HINT_T1);
        _Pragma("GCC unroll 4") for (int i = 0; i < LW_STRETCH; i += 2) {
            add(sums, &tile, at + i, vectors, outputs, half, 0);
            add(sums, &tile, at + i + 1, vectors, outputs, half, 1);
        }
    }
    for (; at + 2 <= tile.inputs; at += 2) {
        add(sums, &tile, at, vectors, outputs, half, 0);
        add(sums, &tile, at + 1, vectors, outputs, half, 1);
    }
    if (at < tile.inputs) add_last(sums, &tile, vectors, outputs, half);
    UNROLL for (int output = 0; output < outputs; output++) {
        UNROLL for (int v = 0; v < vectors; v++)
            _mm256_storeu_ps(target + (output * LW_WIDE + v) * LW_VECTOR, sums[output][v]);
    }
}

FAST void multiply_of(const struct lw_tile *tile, float *sums, const int vectors, const int half) {
    switch (tile->outputs) {
        case 1: multiply_some(tile, sums, vectors, 1, half); break;
        case 2: multiply_some(tile, sums, vectors, 2, half); break;
        case 3: multiply_some(tile, sums, vectors, 3, half); break;
        case 4: multiply_some(tile, sums, vectors, 4, half); break;
        case 5: multiply_some(tile, sums, vectors, 5, half); break;
        case 6: multiply_some(tile, sums, vectors, 6, half); break;
        case 7: multiply_some(tile, sums, 1, 7, half); break;
        default: multiply_some(tile, sums, 1, 8, half); break;
    }
}

ENTRY void multiply_floats(const struct lw_tile *tile, float *sums) {
    if (tile->vectors == 1) {
        multiply_of(tile, sums, 1, 0);
    } else {
        multiply_of(tile, sums, 2, 0);
    }
}

ENTRY void multiply_halves(const struct lw_tile *tile, float *sums) {
    if (tile->vectors == 1) {
        multiply_of(tile, sums, 1, 1);
    } else {
        multiply_of(tile, sums, 2, 1);
    }
}

static void multiply(const struct lw_tile *tile, float *sums) {
    if (tile->half) {
        multiply_halves(tile, sums);
    } else {
        multiply_floats(tile, sums);
    }
}

const struct lw_linear_simd lw_linear_avx2 = {"avx2", multiply};
#endif
