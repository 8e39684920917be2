/* Walks rectangles: picks the kernel that fits a rectangle's strides, and gives it strips of columns with their weights. */
#include "kernels.h"

#include <string.h>

/* Seeds lie a bit more than a multiple of a page apart, so that the four streams do not compete for the same cache sets. */
#define CACHE_STRIDE (LW_CACHED_UNITS + LW_OVERREAD_UNITS + 480)

/* Not touched until it is needed: the system gives no memory to what was never written. */
static int16_t cache[LW_SEEDS][CACHE_STRIDE] __attribute__((aligned(64)));
static int64_t cached; /* written with the GIL held, by lw_prepare alone */

static int64_t units_of(int64_t item_bytes) { return item_bytes < 2 ? 1 : item_bytes / 2; }

static void fill_cache(int64_t needed) {
    for (int seed = 0; seed < LW_SEEDS; seed++)
        for (int64_t column = cached; column < needed; column++) cache[seed][column] = lw_column_weight(seed, column);
    cached = needed;
}

static int64_t end_of(const struct lw_rectangle *r) {
    return r->rows && r->columns ? (r->column_first + (r->columns - 1) * r->column_step + 1) * units_of(r->item_bytes) : 0;
}

void lw_prepare(const int64_t *rows, size_t row_columns, size_t count) {
    int64_t needed = 0;
    for (size_t i = 0; i < count; i++) {
        int64_t end = end_of((const struct lw_rectangle *)(const void *)(rows + i * row_columns));
        if (end > needed) needed = end;
    }
    needed = (needed + 4095) & ~(int64_t)4095;
    if (needed > LW_CACHED_UNITS) needed = LW_CACHED_UNITS;
    if (needed > cached) fill_cache(needed);
}

static int in_cache(const struct lw_rectangle *r) { return r->column_step == 1 && end_of(r) <= LW_CACHED_UNITS; }

/* The weights of `columns` columns from number `left` of the rectangle's on. */
static struct lw_weights weights_at(const struct lw_rectangle *r, int64_t left, int64_t columns, struct lw_scratch *scratch) {
    int64_t units = units_of(r->item_bytes);
    int64_t first = (r->column_first + left * r->column_step) * units, step = r->column_step * units;
    if (in_cache(r)) return (struct lw_weights){&cache[0][first], CACHE_STRIDE};
    int known = end_of(r) <= LW_CACHED_UNITS;
    for (int seed = 0; seed < LW_SEEDS; seed++) {
        int16_t *weights = scratch->weights[seed];
        for (int64_t column = 0; column < columns; column++)
            for (int64_t unit = 0; unit < units; unit++) {
                int64_t at = first + column * step + unit;
                *weights++ = known ? cache[seed][at] : lw_column_weight(seed, at);
            }
        memset(weights, 0, LW_OVERREAD_UNITS * sizeof *weights);
    }
    return (struct lw_weights){scratch->weights[0], LW_SCRATCH_UNITS + LW_OVERREAD_UNITS};
}

static struct lw_lines lines_of(const struct lw_rectangle *r, int64_t left, int64_t columns, int stream) {
    int64_t source_item = r->cast ? 4 : r->item_bytes;
    return (struct lw_lines){
        .source = (const uint8_t *)(intptr_t)(r->source + left * source_item),
        .target = r->target ? (uint8_t *)(intptr_t)(r->target + left * r->item_bytes) : NULL,
        .source_stride = r->row_stride,
        .target_stride = r->target_row_stride,
        .row_first = r->row_first,
        .row_step = r->row_step,
        .rows = r->rows,
        .units = columns * units_of(r->item_bytes),
        .unit_bytes = r->item_bytes < 2 ? 1 : 2,
        .cast = (int)r->cast,
        .stream = stream,
    };
}

static void run_columns(const struct lw_rectangle *r, int64_t left, int64_t columns, const struct lw_simd *simd,
                        struct lw_scratch *scratch, struct lw_weights weights, uint32_t *sums) {
    struct lw_columns c = {
        .source = (const uint8_t *)(intptr_t)(r->source + left * r->column_stride),
        .column_stride = r->column_stride,
        .columns = columns,
        .row_first = r->row_first,
        .row_step = r->row_step,
        .rows = r->rows,
        .item_bytes = (int)r->item_bytes,
        .weights = weights,
    };
    simd->columns(&c, scratch, sums);
}

/* Neither rows nor columns are contiguous, or a transposed source has to be moved: through tiles that stay in the cache. */
static void run_tiles(const struct lw_rectangle *r, int64_t left, int64_t columns, const struct lw_simd *simd,
                      struct lw_scratch *scratch, struct lw_weights weights, uint32_t *sums) {
    int64_t source_item = r->cast ? 4 : r->item_bytes, width = lw_least(256, columns);
    int64_t height = LW_TILE_BYTES / (width * source_item);
    if (height > 64) height = 64;
    for (int64_t top = 0; top < r->rows; top += height) {
        for (int64_t across = 0; across < columns; across += width) {
            int64_t tile_columns = lw_least(width, columns - across), tile_stride = tile_columns * source_item;
            struct lw_lines l = lines_of(r, left + across, tile_columns, scratch->stream);
            l.rows = lw_least(height, r->rows - top);
            lw_gather(scratch->tile, tile_stride,
                      (const uint8_t *)(intptr_t)(r->source + top * r->row_stride + (left + across) * r->column_stride),
                      r->row_stride, r->column_stride, l.rows, tile_columns, source_item);
            l.source = scratch->tile;
            l.source_stride = tile_stride;
            l.row_first += top * r->row_step;
            if (l.target != NULL) l.target += top * r->target_row_stride;
            l.digests = sums != NULL;
            l.weights = (struct lw_weights){weights.first + across * units_of(r->item_bytes), weights.stride};
            simd->lines(&l, sums);
        }
    }
}

enum { NARROW_BYTES = 512, BLOCK_BYTES = 32768 };

/* Narrow lines that lie one after the other on both sides: stores past the caches want longer runs than these lines are. So a
 * block is digested, which takes it into the cache, and then moved as one run; with a cast the other way round. */
static int in_runs(const struct lw_rectangle *r, int64_t columns) {
    int64_t line_bytes = r->columns * r->item_bytes, source_item = r->cast ? 4 : r->item_bytes;
    return r->target && columns == r->columns && line_bytes < NARROW_BYTES && r->rows > 1 &&
           r->row_stride == r->columns * source_item && r->target_row_stride == line_bytes;
}

static void run_runs(const struct lw_rectangle *r, const struct lw_simd *simd, struct lw_scratch *scratch,
                     struct lw_weights weights, uint32_t *sums) {
    int64_t line_bytes = r->columns * r->item_bytes, height = BLOCK_BYTES / line_bytes;
    for (int64_t top = 0; top < r->rows; top += height) {
        struct lw_lines l = lines_of(r, 0, r->columns, 0), run = l;
        l.rows = lw_least(height, r->rows - top);
        l.row_first += top * r->row_step;
        l.source += top * r->row_stride;
        l.target += top * line_bytes;
        l.weights = weights;
        l.digests = 1;
        run.source = l.source, run.target = l.target, run.rows = 1, run.units = l.rows * l.units;
        if (r->cast) simd->lines(&run, NULL), l.source = l.target, l.source_stride = line_bytes, l.cast = 0;
        uint8_t *target = l.target;
        l.target = NULL;
        simd->lines(&l, sums);
        if (r->cast) continue;
        if (scratch->stream) {
            simd->stream(target, l.source, l.rows * line_bytes);
        } else {
            memcpy(target, l.source, (size_t)(l.rows * line_bytes));
        }
    }
}

enum shape { LINES, COLUMNS, TILES };

static enum shape shape_of(const struct lw_rectangle *r) {
    int64_t source_item = r->cast ? 4 : r->item_bytes;
    if (!r->target && r->rows > 1 && r->row_stride == source_item && (r->columns == 1 || r->column_stride != source_item))
        return COLUMNS;
    return r->columns == 1 || r->column_stride == source_item ? LINES : TILES;
}

void lw_rectangle_run(const struct lw_rectangle *r, const struct lw_simd *simd, struct lw_scratch *scratch, uint32_t *sums) {
    if (r->rows == 0 || r->columns == 0) return;
    enum shape shape = shape_of(r);
    int64_t strip = (in_cache(r) ? LW_STRIP_UNITS : LW_SCRATCH_UNITS) / units_of(r->item_bytes);
    if (shape == COLUMNS && in_cache(r)) strip = r->columns;
    for (int64_t left = 0; left < r->columns; left += strip) {
        int64_t columns = lw_least(strip, r->columns - left);
        struct lw_weights weights = {cache[0], CACHE_STRIDE}; /* somewhere to point at, where nothing is weighed */
        if (sums != NULL) weights = weights_at(r, left, columns, scratch);
        if (shape == COLUMNS) {
            run_columns(r, left, columns, simd, scratch, weights, sums);
        } else if (shape == TILES) {
            run_tiles(r, left, columns, simd, scratch, weights, sums);
        } else if (sums != NULL && in_runs(r, columns)) {
            run_runs(r, simd, scratch, weights, sums);
        } else {
            struct lw_lines l = lines_of(r, left, columns, scratch->stream);
            l.digests = sums != NULL;
            l.weights = weights;
            simd->lines(&l, sums);
        }
    }
}
