// Convolution over the slots of draft blocks, bfloat16, for x86 with AVX512-BF16. See local_convolution.py.
//
// Compiled for TAPS and GROUP, the channels that share a dynamic weight (a multiple of 16). One pass: each row is read
// once a tap, sums are float32 and rounded once.
#include <immintrin.h>
#include <stdint.h>

#include "bf16.h"

// z, out and `residual` (NULL: none) [rows, hidden]; base [TAPS, hidden]; dynamic [rows, dynamic_stride], of which a
// row's TAPS * hidden / GROUP are read. A row's place in its block is its number modulo `slots`.
void local_convolution(const bf16 *z, const bf16 *residual, const bf16 *base, const bf16 *dynamic,
                       int64_t dynamic_stride, bf16 *out, int64_t rows, int64_t hidden, int64_t slots, int threads) {
    const int64_t groups = hidden / GROUP;
#pragma omp parallel for num_threads(threads) if (rows > 16)
    for (int64_t row = 0; row < rows; row++) {
        const int64_t slot = row % slots, at = row * hidden;
        const int taps = slot + 1 < TAPS ? (int)slot + 1 : TAPS;
        const bf16 *weights = dynamic + row * dynamic_stride;
        for (int64_t c = 0; c < hidden; c += 16) {
            __m512 sum = residual ? load(residual + at + c) : _mm512_setzero_ps();
            for (int i = 0; i < taps; i++) {
                const __m512 own = _mm512_set1_ps(widen(weights[i * groups + c / GROUP]));
                const __m512 weight = _mm512_add_ps(load(base + i * hidden + c), own);
                sum = _mm512_fmadd_ps(weight, load(z + at - i * hidden + c), sum);
            }
            _mm256_storeu_si256((__m256i *)(out + at + c), (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}
