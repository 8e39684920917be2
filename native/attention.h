/* Attention over a paged cache: the shared nouns.
 *
 * attention_module.c checks arguments and releases the GIL; attention.c walks rows, heads and chunks of positions;
 * attention_avx2.c and attention_portable.c do the inner work, in one shape each: struct lw_attention_simd.
 *
 * A page holds block_tokens positions of one kv head. Values lie in it as [tokens, dim], keys turned, as [dim, tokens]: a vector
 * of neighbouring positions is then one load, and a score is a sum in the order of the dimensions without a reduction.
 *
 * The softmax runs over chunks of LW_CHUNK positions counted from position 0. What is computed for a query, and in which order,
 * follows from its own context alone, whatever other queries share its tile.
 */
#ifndef LIVEWEIGHT_ATTENTION_H
#define LIVEWEIGHT_ATTENTION_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define LW_X86 1
#else
#define LW_X86 0
#endif

enum {
    LW_VECTOR = 8,                   /* positions that are scored at once */
    LW_CHUNK = 128,                  /* positions between two corrections of the softmax */
    LW_VECTORS = LW_CHUNK / LW_VECTOR,
    LW_KEY_STRIDE = LW_CHUNK + 16,   /* of gathered keys; a power of two would crowd a few sets of the cache */
    LW_GROUP = 6,                    /* queries of one inner kernel */
    LW_TILE = 8 * LW_GROUP,          /* queries that share a chunk's keys and values */
    LW_MAX_DIM = 4096,
};

/* A layer's pages: [blocks, kv_heads, ...]. half: items are bfloat16, otherwise float. */
struct lw_pages {
    void *keys, *values;
    int64_t blocks, kv_heads, block_tokens, dim;
    int half;
};

/* Tokens of a step: row r has those from starts[r] to starts[r + 1], and its pages in tables[r]. */
struct lw_step {
    const int64_t *starts, *positions;
    const int32_t *tables;
    int64_t rows, tokens, table_blocks;
};

/* [tokens, heads, dim], the items of a head side by side. Strides count items. */
struct lw_heads {
    void *data;
    int64_t token_stride, head_stride, heads;
    int half;
};

/* A chunk of positions. Vector v of the keys has dimension d at keys[v] + d * key_stride items; half: items are bfloat16. */
struct lw_chunk {
    const void *keys[LW_VECTORS];
    const void *values[LW_CHUNK];
    int64_t key_stride;
    int half;
};

/* Where a query's softmax stands. */
struct lw_softmax {
    float highest, sum;
};

struct lw_attention_simd {
    const char *name;
    int64_t dim_step; /* dimensions must be a multiple of it */
    int halves;       /* takes chunks of bfloat16 */

    /* Scores of `rows` queries, given as [dim, rows], for the first `vectors` vectors of the chunk: [rows, LW_CHUNK]. */
    void (*score)(const float *queries, int rows, const struct lw_chunk *chunk, int64_t vectors, int64_t dim, float *scores);

    /* Turns the first `count` scores into weights. What earlier chunks have summed is to be multiplied by the result. */
    float (*weigh)(float *scores, int64_t count, struct lw_softmax *softmax);

    /* Adds positions [first, last) of the chunk to `rows` sums [rows, dim], by weights [rows, LW_CHUNK]. */
    void (*mix)(const float *weights, int rows, const struct lw_chunk *chunk, int64_t first, int64_t last, int64_t dim,
                float *sums);

    /* rows x columns bfloat16 into floats. Strides count items. */
    void (*widen)(float *target, int64_t target_stride, const uint16_t *source, int64_t source_stride, int64_t rows,
                  int64_t columns);
};

extern const struct lw_attention_simd lw_attention_portable;
#if LW_X86
extern const struct lw_attention_simd lw_attention_avx2;
#endif

/* The fastest for this processor and so many dimensions. */
const struct lw_attention_simd *lw_attention_best(int64_t dim);

/* Both trust that everything lies within its bounds: attention_module.c has checked it. */
void lw_store(const struct lw_pages *pages, const struct lw_step *step, const struct lw_heads *key,
              const struct lw_heads *value);

/* 0, or -1 where there is no memory for the scratch. */
int lw_attend(const struct lw_pages *pages, const struct lw_step *step, const struct lw_heads *query,
              const struct lw_heads *out, const struct lw_attention_simd *simd);

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
