/* Turns the activations into tiles; walks the weight, a few rows after the other, each with every tile. */
#include "linear.h"

#include <stdlib.h>

enum { TILE_ROWS = LW_WIDE * LW_VECTOR };

static int64_t tiles_of(int64_t rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }

/* The last tile has one vector where that is enough. */
static int vectors_of(int64_t rows, int64_t tile) {
    return (int)lw_less((rows - tile * TILE_ROWS + LW_VECTOR - 1) / LW_VECTOR, LW_WIDE);
}

static void turn_some(const struct lw_matrix *x, int64_t row, int64_t from, int64_t until, float *target, int64_t width) {
    if (row >= x->rows) {
        for (int64_t i = from; i < until; i++) target[i * width] = 0.0f;
    } else if (x->half) {
        const uint16_t *items = (const uint16_t *)x->data + row * x->stride;
        for (int64_t i = from; i < until; i++) target[i * width] = lw_widened(items[i]);
    } else {
        const float *items = (const float *)x->data + row * x->stride;
        for (int64_t i = from; i < until; i++) target[i * width] = items[i];
    }
}

/* A tile's rows as [inputs, width], a stretch after the other; rows that there are not are zeros. */
static void turn(const struct lw_matrix *x, int64_t tile, float *target) {
    int64_t width = vectors_of(x->rows, tile) * LW_VECTOR;
    for (int64_t from = 0; from < x->columns; from += LW_STRETCH)
        for (int64_t lane = 0; lane < width; lane++)
            turn_some(x, tile * TILE_ROWS + lane, from, lw_less(from + LW_STRETCH, x->columns), target + lane, width);
}

static void store(const struct lw_matrix *out, int64_t tile, int64_t first, int64_t outputs, const float *sums) {
    int64_t rows = lw_less(TILE_ROWS, out->rows - tile * TILE_ROWS);
    for (int64_t lane = 0; lane < rows; lane++) {
        int64_t at = (tile * TILE_ROWS + lane) * out->stride + first;
        for (int64_t i = 0; i < outputs; i++) {
            float sum = sums[i * TILE_ROWS + lane];
            if (out->half) {
                ((uint16_t *)out->data)[at + i] = lw_narrowed(sum);
            } else {
                ((float *)out->data)[at + i] = sum;
            }
        }
    }
}

/* While a tile is multiplied, its share of the weight's next rows comes from memory. */
static void walk(const float *turned, const struct lw_matrix *x, const struct lw_matrix *weight, const struct lw_matrix *out,
                 const struct lw_linear_simd *simd) {
    int64_t inputs = weight->columns, tiles = tiles_of(x->rows), item_bytes = weight->half ? 2 : 4;
    int64_t block = x->rows <= LW_VECTOR ? LW_OUTPUTS : LW_OUTPUTS_WIDE;
    int64_t ahead = block * LW_STRETCH * item_bytes / LW_LINE, lines = (ahead + tiles - 1) / tiles;
    int64_t share = inputs / LW_STRETCH * lines * LW_LINE;
    float sums[LW_OUTPUTS * TILE_ROWS];
    for (int64_t first = 0; first < weight->rows; first += block) {
        int64_t outputs = lw_less(block, weight->rows - first);
        const char *here = (const char *)weight->data + first * inputs * item_bytes;
        for (int64_t i = 0; i < tiles; i++) {
            struct lw_tile tile = {.x = turned + i * TILE_ROWS * inputs,
                                   .weight = here,
                                   .inputs = inputs,
                                   .vectors = vectors_of(x->rows, i),
                                   .outputs = (int)outputs,
                                   .half = weight->half};
            if (first + block < weight->rows) {
                tile.lines = (int)lines;
                tile.next = (uintptr_t)(here + block * inputs * item_bytes) + (uintptr_t)(i * share);
            }
            simd->multiply(&tile, sums);
            store(out, i, first, outputs, sums);
        }
    }
}

int lw_linear(const struct lw_matrix *x, const struct lw_matrix *weight, const struct lw_matrix *out,
              const struct lw_linear_simd *simd) {
    if (x->rows == 0 || weight->rows == 0) return 0;
    size_t floats = (size_t)tiles_of(x->rows) * TILE_ROWS, inputs = (size_t)x->columns + 1;
    if (floats > SIZE_MAX / 8 / inputs) return -1;
    float *turned = aligned_alloc(LW_LINE, floats * inputs * sizeof(float));
    if (turned == NULL) return -1;
    for (int64_t tile = 0; tile < tiles_of(x->rows); tile++) turn(x, tile, turned + tile * TILE_ROWS * x->columns);
    walk(turned, x, weight, out, simd);
    free(turned);
    return 0;
}

const struct lw_linear_simd *lw_linear_best(void) {
#if LW_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &lw_linear_avx2;
#endif
    return &lw_linear_portable;
}
