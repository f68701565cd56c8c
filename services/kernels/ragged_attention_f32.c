// Attention of ragged query blocks over paged float32 K/V, for any processor. See ragged_attention.py.
//
// One item is one block and one KV head: its queries (query tokens x query heads of the group) share each pass over the
// head's keys and values. A row's result does not depend on the rows beside it.
//
// Compiled for one HEAD_DIM (a multiple of 32) and PAGE.
#include <math.h>

typedef float number;
#include "ragged_attention.h"

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define ROWS 4     // rows that share one pass over the values
#define COLUMNS 2  // vectors of a value that they take at a time

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

static inline float sum_of(vec x) {
    float parts[LANES];
    *(vec *)parts = x;
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

static inline float dot(const float *a, const float *b) {
    vec even = {0}, odd = {0};
    for (int i = 0; i < HEAD_DIM; i += 2 * LANES) {
        even += *(const vec *)(a + i) * *(const vec *)(b + i);
        odd += *(const vec *)(a + i + LANES) * *(const vec *)(b + i + LANES);
    }
    return sum_of(even + odd);
}

// 2^x for x <= 0, 0 below the smallest normal number: as exp2.h, which see, in a form that compilers vectorise.
static inline float power(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    const float bounded = x < -126.0f ? -126.0f : x, whole = (bounded + magic) - magic, f = bounded - whole;
    float y = 1.5403530e-4f;
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    union {
        int32_t bits;
        float value;
    } by = {((int32_t)whole + 127) << 23};
    return x < -126.0f ? 0.0f : y * by.value;
}

// Turns scores[from..to) into probabilities times their sum, which is returned, with zeros elsewhere up to `padded`.
static inline float softmax_row(float *scores, int64_t from, int64_t to, int64_t padded, float scale) {
    float top[LANES], sum[LANES] = {0}, max = -INFINITY;
    for (int64_t k = 0; k < from; k++) scores[k] = -INFINITY;
    for (int64_t k = to; k < padded; k++) scores[k] = -INFINITY;
    for (int i = 0; i < LANES; i++) top[i] = -INFINITY;
    for (int64_t k = 0; k < padded; k += LANES)
        for (int i = 0; i < LANES; i++) top[i] = scores[k + i] > top[i] ? scores[k + i] : top[i];
    for (int i = 0; i < LANES; i++) max = top[i] > max ? top[i] : max;
    for (int64_t k = 0; k < padded; k += LANES)
        for (int i = 0; i < LANES; i++) sum[i] += scores[k + i] = power((scores[k + i] - max) * scale);
    return sum_of(*(vec *)sum);
}

// Rows i .. i + n - 1 of the output, columns c and on: sums of values [from, to) by probability, over the sum of those.
static inline void weigh(const float *probs, const float *sums, int i, int n, int c, int64_t from, int64_t to,
                         const float *values, const Span *span, const Output *out) {
    vec sum[ROWS][COLUMNS] = {{{0}}};
    for (int64_t k = from; k < to; k++) {
        const vec *v = (const vec *)(cell(values, span, k) + c);
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < COLUMNS; j++) sum[r][j] += probs[(r < n ? r : 0) * span->padded + k] * v[j];
    }
    for (int r = 0; r < n; r++)
        for (int j = 0; j < COLUMNS; j++) *((vec *)(output_row(out, i + r) + c) + j) = sum[r][j] / sums[r];
}

static inline int64_t work_of(int rows, const Span *span) { return rows * span->padded; }

static void begin_thread(void) {}

static void end_thread(void) {}

static void attend(const Queries *block, const float *keys, const float *values, const Span *span, Output out,
                   float *work, float scale) {
    const int fold = block->fold, rows = block->tokens * fold;
    const int64_t seen = block->end - span->base;
    for (int64_t k = 0; k < seen; k++) {
        const float *key = cell(keys, span, k);
        for (int i = 0; i < rows; i++)
            work[i * span->padded + k] = dot(block->q + (i / fold) * block->stride + (i % fold) * HEAD_DIM, key);
    }
    for (int i = 0; i < rows; i += ROWS) {
        const int n = rows - i < ROWS ? rows - i : ROWS;
        float *probs = work + i * span->padded, sums[ROWS];
        int64_t first = seen, last = 0;
        for (int r = 0; r < n; r++) {
            int64_t from, to;
            view_of(block, span, i + r, &from, &to);
            sums[r] = softmax_row(probs + r * span->padded, from, to, span->padded, scale);
            first = from < first ? from : first;
            last = to > last ? to : last;
        }
        for (int c = 0; c < HEAD_DIM; c += COLUMNS * LANES)
            weigh(probs, sums, i, n, c, first, last, values, span, &out);
    }
}
