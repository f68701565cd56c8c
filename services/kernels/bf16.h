// bfloat16 numbers, 16 at a time as float32, for x86 with AVX512-BF16. Shared by kernels.
#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

static inline __m512 load(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}

static inline void store(bf16 *p, __m512 x) { _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x)); }

static inline float widen(bf16 x) {
    union {
        uint32_t bits;
        float value;
    } word = {(uint32_t)x << 16};
    return word.value;
}
