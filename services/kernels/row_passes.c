// Row-wise passes between the matrix products of a decoder, bfloat16, for x86 with AVX512-BF16. See row_passes.py.
//
// Each reads its input once; arithmetic is float32 and rounded once. Sizes are multiples of 16.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "bf16.h"
#include "exp2.h"

// Below this many numbers a second thread costs more than it saves.
#define ALONE 8192

// e^x for x <= 0; 0 from about -104 on.
static inline __m512 exp_512(__m512 x) {
    return exp2_512(_mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-200.0f)));
}

// x [rows, stride], of which heads * size are read; weight float32 [heads * size], or [size] if `shared`;
// out [rows, heads * size]: each head over the root of its mean square + eps, times weight.
void rms_norm(const bf16 *x, int64_t stride, const float *weight, int shared, float eps, bf16 *out, int64_t rows,
              int64_t heads, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * size > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const bf16 *from = x + row * stride + head * size;
            const float *scale = weight + (shared ? 0 : head * size);
            bf16 *to = out + (row * heads + head) * size;
            __m512 sum = _mm512_setzero_ps();
            for (int64_t c = 0; c < size; c += 16) sum = _mm512_fmadd_ps(load(from + c), load(from + c), sum);
            const __m512 by = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)size + eps));
            for (int64_t c = 0; c < size; c += 16)
                store(to + c, _mm512_mul_ps(_mm512_mul_ps(load(from + c), by), _mm512_loadu_ps(scale + c)));
        }
}

// gate_up [rows, 2 * size], gate first -> out [rows, size]: gate * sigmoid(gate) * up.
void silu_mul(const bf16 *gate_up, bf16 *out, int64_t rows, int64_t size, int threads) {
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
#pragma omp parallel for num_threads(threads) if (rows * size > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < size; c += 16) {
            const __m512 gate = load(gate_up + row * 2 * size + c), up = load(gate_up + (row * 2 + 1) * size + c);
            // With e = exp(-|gate|): sigmoid is 1 / (1 + e), or e / (1 + e) where the gate is negative.
            const __m512 e = exp_512(_mm512_or_ps(gate, sign));
            const __m512 top = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ), one, e);
            const __m512 sigmoid = _mm512_div_ps(top, _mm512_add_ps(one, e));
            store(out + row * size + c, _mm512_mul_ps(_mm512_mul_ps(gate, sigmoid), up));
        }
}

// x [rows, stride], of which heads * size are read; cos [rows, size], sin [rows, size / 2]; out [rows, heads * size]:
// each head's halves (a, b) become (a * cos - b * sin, b * cos + a * sin). size is a multiple of 32.
void rotate(const bf16 *x, int64_t stride, const bf16 *cos, const bf16 *sin, bf16 *out, int64_t rows, int64_t heads,
            int64_t size, int threads) {
    const int64_t half = size / 2;
#pragma omp parallel for num_threads(threads) if (rows * heads * size > ALONE)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const bf16 *from = x + row * stride + head * size;
            bf16 *to = out + (row * heads + head) * size;
            for (int64_t c = 0; c < half; c += 16) {
                const __m512 a = load(from + c), b = load(from + half + c), turn = load(sin + row * half + c);
                store(to + c, _mm512_fnmadd_ps(b, turn, _mm512_mul_ps(a, load(cos + row * size + c))));
                store(to + half + c, _mm512_fmadd_ps(a, turn, _mm512_mul_ps(b, load(cos + row * size + half + c))));
            }
        }
}
