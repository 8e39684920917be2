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

/* What all of a call shares. `turned` are the tiles of x; `widened` has place for a block of bfloat16 rows, LW_LINE bytes more
 * than they are long: lines of a power of two would crowd a few sets of the cache. */
struct work {
    const struct lw_matrix *x, *weight, *out;
    const struct lw_linear_simd *simd;
    float *turned, *widened;
    int64_t block;
};

static int64_t widened_stride(int64_t inputs) { return (inputs + LW_STRETCH - 1) / LW_STRETCH * LW_STRETCH + LW_STRETCH; }

/* Where the inner kernels read the rows from `first` on: as they lie, or widened once for more rows of x than a vector has. */
static void place(const struct work *work, int64_t first, struct lw_tile *tile) {
    int64_t inputs = tile->inputs;
    int half = work->weight->half;
    const char *rows = (const char *)work->weight->data + first * inputs * (half ? 2 : 4);
    tile->half = half && work->x->rows <= LW_VECTOR;
    tile->weight = rows;
    tile->stride = inputs;
    if (!half || tile->half) return;
    tile->weight = work->widened;
    tile->stride = widened_stride(inputs);
    for (int64_t i = 0; i < tile->outputs; i++)
        work->simd->widen(work->widened + i * tile->stride, (const uint16_t *)(const void *)rows + i * inputs, inputs);
}

/* While a tile is multiplied, its share of the weight's next rows comes from memory. */
static void walk(const struct work *work) {
    const struct lw_matrix *weight = work->weight;
    int64_t inputs = weight->columns, tiles = tiles_of(work->x->rows), block = work->block, item_bytes = weight->half ? 2 : 4;
    int64_t lines = (block * LW_STRETCH * item_bytes / LW_LINE + tiles - 1) / tiles;
    float sums[LW_OUTPUTS * TILE_ROWS];
    for (int64_t first = 0; first < weight->rows; first += block) {
        uintptr_t next = (uintptr_t)weight->data + (uintptr_t)((first + block) * inputs * item_bytes);
        struct lw_tile tile = {.inputs = inputs, .outputs = (int)lw_less(block, weight->rows - first)};
        tile.lines = first + block < weight->rows ? (int)lines : 0;
        place(work, first, &tile);
        for (int64_t i = 0; i < tiles; i++) {
            tile.x = work->turned + i * TILE_ROWS * inputs;
            tile.vectors = vectors_of(work->x->rows, i);
            tile.next = next + (uintptr_t)(i * (inputs / LW_STRETCH) * lines * LW_LINE);
            work->simd->multiply(&tile, sums);
            store(work->out, i, first, tile.outputs, sums);
        }
    }
}

int lw_linear(const struct lw_matrix *x, const struct lw_matrix *weight, const struct lw_matrix *out,
              const struct lw_linear_simd *simd) {
    if (x->rows == 0 || weight->rows == 0) return 0;
    struct work work = {.x = x, .weight = weight, .out = out, .simd = simd};
    work.block = x->rows <= LW_VECTOR ? LW_OUTPUTS : LW_OUTPUTS_WIDE;
    int64_t tiles = tiles_of(x->rows), lanes = tiles * TILE_ROWS + (weight->half ? work.block : 0);
    int64_t stride = widened_stride(x->columns);
    if (stride > PTRDIFF_MAX / 4 / lanes) return -1;
    work.turned = aligned_alloc(LW_LINE, (size_t)(lanes * stride) * sizeof(float));
    if (work.turned == NULL) return -1;
    work.widened = work.turned + tiles * TILE_ROWS * stride;
    for (int64_t tile = 0; tile < tiles; tile++) turn(x, tile, work.turned + tile * TILE_ROWS * x->columns);
    walk(&work);
    free(work.turned);
    return 0;
}

const struct lw_linear_simd *lw_linear_best(void) {
#if LW_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &lw_linear_avx2;
#endif
    return &lw_linear_portable;
}
