/* The inner work in plain C: other architectures, heads whose size is no multiple of eight, the measure for attention_avx2.c. */
#include "attention.h"

#include <math.h>

static void score(const float *queries, int rows, const struct lw_chunk *chunk, int64_t vectors, int64_t dim, float *scores) {
    for (int row = 0; row < rows; row++) {
        for (int64_t v = 0; v < vectors; v++) {
            const float *keys = chunk->keys[v];
            float sums[LW_VECTOR] = {0};
            for (int64_t d = 0; d < dim; d++)
                for (int i = 0; i < LW_VECTOR; i++)
                    sums[i] += queries[d * rows + row] * keys[d * chunk->key_stride + i];
            memcpy(scores + row * LW_CHUNK + v * LW_VECTOR, sums, sizeof sums);
        }
    }
}

static float weigh(float *scores, int64_t count, struct lw_softmax *softmax) {
    float highest = softmax->highest, sum = 0.0f;
    for (int64_t i = 0; i < count; i++) highest = scores[i] > highest ? scores[i] : highest;
    for (int64_t i = 0; i < count; i++) {
        scores[i] = expf(scores[i] - highest);
        sum += scores[i];
    }
    float by = expf(softmax->highest - highest);
    softmax->sum = softmax->sum * by + sum;
    softmax->highest = highest;
    return by;
}

static void mix(const float *weights, int rows, const struct lw_chunk *chunk, int64_t first, int64_t last, int64_t dim,
                float *sums) {
    for (int row = 0; row < rows; row++) {
        float *restrict sum = sums + row * dim;
        for (int64_t i = first; i < last; i++) {
            const float *value = chunk->values[i];
            float weight = weights[row * LW_CHUNK + i];
            for (int64_t d = 0; d < dim; d++) sum[d] += weight * value[d];
        }
    }
}

static void widen(float *target, int64_t target_stride, const uint16_t *source, int64_t source_stride, int64_t rows,
                  int64_t columns) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t column = 0; column < columns; column++)
            target[row * target_stride + column] = lw_widened(source[row * source_stride + column]);
}

const struct lw_attention_simd lw_attention_portable = {"portable", 1, 0, score, weigh, mix, widen};
