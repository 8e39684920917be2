/* The inner work in plain C: other architectures, and the measure for linear_avx2.c. */
#include "linear.h"

static float item(const void *data, int64_t at, int half) {
    return half ? lw_widened(((const uint16_t *)data)[at]) : ((const float *)data)[at];
}

static void multiply(const struct lw_tile *tile, float *sums) {
    int width = tile->vectors * LW_VECTOR;
    for (int output = 0; output < tile->outputs; output++) {
        float sum[LW_WIDE * LW_VECTOR] = {0};
        for (int64_t i = 0; i < tile->inputs; i++) {
            float weight = item(tile->weight, output * tile->stride + i, tile->half);
            for (int lane = 0; lane < width; lane++) sum[lane] += weight * tile->x[i * width + lane];
        }
        memcpy(sums + output * LW_WIDE * LW_VECTOR, sum, sizeof sum);
    }
}

static void widen(float *target, const uint16_t *source, int64_t count) {
    for (int64_t i = 0; i < count; i++) target[i] = lw_widened(source[i]);
}

const struct lw_linear_simd lw_linear_portable = {"portable", multiply, widen};
