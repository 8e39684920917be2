/* The product of few rows of activations and a weight: the shared nouns.
 *
 * linear_module.c checks arguments and releases the GIL; linear.c turns the activations and walks the weight;
 * linear_avx2.c and linear_portable.c do the inner work, in one shape each: struct lw_linear_simd.
 *
 * Sums are in float. A weight is read as it lies, [outputs, inputs], once and in order, a few of its rows beside each other.
 * Activations are turned, so that a vector has one input of LW_VECTOR rows: an output is then one chain of sums in the order of
 * the inputs, without a reduction. A row's result follows from the row and the weight alone, whatever rows share its tile.
 */
#ifndef LIVEWEIGHT_LINEAR_H
#define LIVEWEIGHT_LINEAR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define LW_X86 1
#else
#define LW_X86 0
#endif

enum {
    LW_VECTOR = 8,       /* rows of activations in a vector */
    LW_WIDE = 2,         /* vectors of a tile, at most */
    LW_OUTPUTS = 8,      /* rows of the weight that an inner kernel reads at once, at most: beside one vector */
    LW_OUTPUTS_WIDE = 6, /* beside LW_WIDE vectors: as many sums as registers hold */
    LW_STRETCH = 16,     /* inputs between two prefetches */
    LW_LINE = 64,        /* bytes of a cache line */
};

/* [rows, columns], the items of a row side by side. The stride counts items. half: items are bfloat16, otherwise float. */
struct lw_matrix {
    void *data;
    int64_t rows, columns, stride;
    int half;
};

/* The work of one inner kernel: `vectors` of turned activations [inputs, vectors * LW_VECTOR], `outputs` rows of the weight,
 * `stride` items from one to the next; half: these are bfloat16, beside one vector only. `lines` cache lines from `next` on are
 * wanted soon, for every LW_STRETCH inputs. */
struct lw_tile {
    const float *x;
    const void *weight;
    int64_t inputs, stride;
    uintptr_t next;
    int vectors, outputs, half, lines;
};

struct lw_linear_simd {
    const char *name;

    /* [LW_OUTPUTS, LW_WIDE * LW_VECTOR] sums; what the tile does not have of them is left as it is. */
    void (*multiply)(const struct lw_tile *tile, float *sums);

    void (*widen)(float *target, const uint16_t *source, int64_t count);
};

extern const struct lw_linear_simd lw_linear_portable;
#if LW_X86
extern const struct lw_linear_simd lw_linear_avx2;
#endif

/* The fastest for this processor. */
const struct lw_linear_simd *lw_linear_best(void);

/* out = x times the transpose of the weight. Trusts the shapes, and that `out` lies apart: linear_module.c has checked it.
 * 0, or -1 where there is no memory for the scratch. */
int lw_linear(const struct lw_matrix *x, const struct lw_matrix *weight, const struct lw_matrix *out,
              const struct lw_linear_simd *simd);

static inline float lw_widened(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t lw_narrowed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0u;
    return (uint16_t)((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

static inline int64_t lw_less(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
