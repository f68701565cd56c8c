// Passes of a drafter's training between its matrix products, and their gradients: bfloat16, for x86 with AVX512-BF16.
// See gradients.py.
//
// Each reads its input once or twice; arithmetic is float32 and rounded once. Sizes are multiples of 16 where not said.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#include "bf16.h"
#include "exp2.h"

#define LOG2E 1.44269504f
#define PARALLEL _Pragma("omp parallel for num_threads(threads)")

static inline __m512 load_some(const bf16 *p, __mmask16 some) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, p)), 16));
}

static inline void store_some(bf16 *p, __m512 x, __mmask16 some) {
    _mm256_mask_storeu_epi16(p, some, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline bf16 narrow(float x) {
    return (bf16)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set1_ps(x)), 0);
}

static inline __m512 exp_512(__m512 x) {  // e^x for x <= 0
    return exp2_512(_mm512_max_ps(_mm512_mul_ps(x, _mm512_set1_ps(LOG2E)), _mm512_set1_ps(-200.0f)));
}

static inline void add_to(float *p, __m512 x) { _mm512_storeu_ps(p, _mm512_add_ps(_mm512_loadu_ps(p), x)); }

// Of y = x / rms(x) * weight over rows of `size`, given by = dL/dy: dx, and dweight [threads, size], to be summed.
void rms_norm_gradient(const bf16 *x, const float *weight, float eps, const bf16 *by, bf16 *dx, float *dweight,
                       int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) {
        float *mine = dweight + part * size;
        for (int64_t row = rows * part / threads; row < rows * (part + 1) / threads; row++) {
            const bf16 *from = x + row * size, *up = by + row * size;
            __m512 square = _mm512_setzero_ps(), dot = _mm512_setzero_ps();
            for (int64_t c = 0; c < size; c += 16) {
                const __m512 v = load(from + c);
                square = _mm512_fmadd_ps(v, v, square);
                dot = _mm512_fmadd_ps(_mm512_mul_ps(load(up + c), _mm512_loadu_ps(weight + c)), v, dot);
            }
            const float scale = 1.0f / sqrtf(_mm512_reduce_add_ps(square) / (float)size + eps);
            const __m512 s = _mm512_set1_ps(scale);
            const __m512 back = _mm512_set1_ps(_mm512_reduce_add_ps(dot) * scale * scale * scale / (float)size);
            for (int64_t c = 0; c < size; c += 16) {
                const __m512 v = load(from + c), g = load(up + c);
                const __m512 wg = _mm512_mul_ps(_mm512_mul_ps(g, _mm512_loadu_ps(weight + c)), s);
                store(dx + row * size + c, _mm512_fnmadd_ps(v, back, wg));
                add_to(mine + c, _mm512_mul_ps(_mm512_mul_ps(g, v), s));
            }
        }
    }
}

// Of silu(gate) * up, gate_up [rows, 2 * size], given by [rows, size]: out [rows, 2 * size].
void silu_mul_gradient(const bf16 *gate_up, const bf16 *by, bf16 *out, int64_t rows, int64_t size, int threads) {
    const __m512 one = _mm512_set1_ps(1.0f), sign = _mm512_set1_ps(-0.0f);
    PARALLEL
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < size; c += 16) {
            const __m512 gate = load(gate_up + row * 2 * size + c), up = load(gate_up + (row * 2 + 1) * size + c);
            const __m512 g = load(by + row * size + c);
            const __m512 e = exp_512(_mm512_or_ps(gate, sign));
            const __m512 top = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(gate, _mm512_setzero_ps(), _CMP_LT_OQ), one, e);
            const __m512 sigmoid = _mm512_div_ps(top, _mm512_add_ps(one, e)), silu = _mm512_mul_ps(gate, sigmoid);
            // silu' = sigmoid * (1 + gate - silu)
            const __m512 slope = _mm512_mul_ps(sigmoid, _mm512_sub_ps(_mm512_add_ps(one, gate), silu));
            store(out + row * 2 * size + c, _mm512_mul_ps(_mm512_mul_ps(g, up), slope));
            store(out + (row * 2 + 1) * size + c, _mm512_mul_ps(g, silu));
        }
}

// Of local_convolution (local_convolution.c), given by [rows, hidden]: dz [rows, hidden], ddynamic [rows, taps * groups],
// dbase [threads, taps, hidden], to be summed. dynamic [rows, stride], hidden = groups * group, group a multiple of 16.
void convolution_gradient(const bf16 *z, const bf16 *base, const bf16 *dynamic, int64_t stride, const bf16 *by, bf16 *dz,
                          bf16 *ddynamic, float *dbase, int64_t rows, int64_t hidden, int64_t group, int64_t taps,
                          int64_t slots, int threads) {
    const int64_t groups = hidden / group, blocks = rows / slots;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int part = 0; part < threads; part++) {
        float *mine = dbase + part * taps * hidden;
        for (int64_t row = blocks * part / threads * slots; row < blocks * (part + 1) / threads * slots; row++) {
            const int64_t slot = row % slots, at = row * hidden;
            for (int64_t g = 0; g < groups; g++) {
                for (int64_t i = 0; i < taps; i++) {  // by the weights of this row
                    __m512 sum = _mm512_setzero_ps();
                    if (slot >= i)
                        for (int64_t c = g * group; c < (g + 1) * group; c += 16) {
                            const __m512 both = _mm512_mul_ps(load(by + at + c), load(z + at - i * hidden + c));
                            sum = _mm512_add_ps(sum, both);
                            add_to(mine + i * hidden + c, both);
                        }
                    ddynamic[(row * taps + i) * groups + g] = narrow(_mm512_reduce_add_ps(sum));
                }
                for (int64_t c = g * group; c < (g + 1) * group; c += 16) {  // by this row, which later ones read too
                    __m512 sum = _mm512_setzero_ps();
                    for (int64_t i = 0; i < taps && slot + i < slots; i++) {
                        const __m512 own = _mm512_set1_ps(widen(dynamic[(row + i) * stride + i * groups + g]));
                        const __m512 weight = _mm512_add_ps(load(base + i * hidden + c), own);
                        sum = _mm512_fmadd_ps(weight, load(by + at + i * hidden + c), sum);
                    }
                    store(dz + at + c, sum);
                }
            }
        }
    }
}

// Softmax over far [rows, keys] and near [rows, slots] together. Row ((b * heads + head) * blocks + n) * slots + j sees
// the first seen[b * blocks + n] far keys, and all near ones. slots <= 16.
void block_softmax(const bf16 *far, const bf16 *near, const int64_t *seen, bf16 *far_p, bf16 *near_p, int64_t batch,
                   int64_t heads, int64_t blocks, int64_t slots, int64_t keys, int threads) {
    const __mmask16 all = (__mmask16)((1u << slots) - 1);
    const __m512 low = _mm512_set1_ps(-1e30f);
    PARALLEL
    for (int64_t row = 0; row < batch * heads * blocks * slots; row++) {
        const int64_t n = row / slots % blocks, b = row / (slots * blocks * heads), end = seen[b * blocks + n];
        const bf16 *from = far + row * keys;
        bf16 *to = far_p + row * keys;
        const __mmask16 some = (__mmask16)((1u << (end % 16)) - 1);
        const int64_t whole = end / 16 * 16;
        const __m512 inside = _mm512_mask_mov_ps(low, all, load_some(near + row * slots, all));
        __m512 most = inside;
        for (int64_t c = 0; c < whole; c += 16) most = _mm512_max_ps(most, load(from + c));
        if (some) most = _mm512_max_ps(most, _mm512_mask_mov_ps(low, some, load(from + whole)));
        const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
        __m512 sum = _mm512_maskz_mov_ps(all, exp_512(_mm512_sub_ps(inside, top)));
        for (int64_t c = 0; c < whole; c += 16) sum = _mm512_add_ps(sum, exp_512(_mm512_sub_ps(load(from + c), top)));
        if (some) sum = _mm512_add_ps(sum, _mm512_maskz_mov_ps(some, exp_512(_mm512_sub_ps(load(from + whole), top))));
        const __m512 by = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
        for (int64_t c = 0; c < whole; c += 16)
            store(to + c, _mm512_mul_ps(exp_512(_mm512_sub_ps(load(from + c), top)), by));
        for (int64_t c = whole; c < keys; c += 16) {
            const __mmask16 here = c == whole ? some : 0;
            store(to + c, _mm512_maskz_mul_ps(here, exp_512(_mm512_sub_ps(load(from + c), top)), by));
        }
        store_some(near_p + row * slots, _mm512_mul_ps(exp_512(_mm512_sub_ps(inside, top)), by), all);
    }
}

// Of block_softmax, from its results and far_by, near_by: the gradients by far and near, written over far_by, near_by.
void block_softmax_gradient(const bf16 *far_p, const bf16 *near_p, bf16 *far_by, bf16 *near_by, int64_t rows,
                            int64_t slots, int64_t keys, int threads) {
    const __mmask16 all = (__mmask16)((1u << slots) - 1);
    PARALLEL
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *p = far_p + row * keys;
        bf16 *by = far_by + row * keys;
        const __m512 near = load_some(near_p + row * slots, all), up = load_some(near_by + row * slots, all);
        __m512 sum = _mm512_mul_ps(near, up);
        for (int64_t c = 0; c < keys; c += 16) sum = _mm512_fmadd_ps(load(p + c), load(by + c), sum);
        const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum));
        for (int64_t c = 0; c < keys; c += 16)
            store(by + c, _mm512_mul_ps(load(p + c), _mm512_sub_ps(load(by + c), mean)));
        store_some(near_by + row * slots, _mm512_mul_ps(near, _mm512_sub_ps(up, mean)), all);
    }
}

// logits [rows, size] become whole * softmax - mass: `total` is the log of each row's mass, whole the sum of
// mass [rows, count], which stands at ids.
void cross_entropy_slope(bf16 *logits, const float *total, const float *whole, const int64_t *ids, const float *mass,
                         int64_t rows, int64_t size, int64_t count, int threads) {
    PARALLEL
    for (int64_t row = 0; row < rows; row++) {
        bf16 *at = logits + row * size;
        const __m512 log = _mm512_set1_ps(total[row]), by = _mm512_set1_ps(whole[row]);
        for (int64_t c = 0; c < size; c += 16)
            store(at + c, _mm512_mul_ps(exp_512(_mm512_sub_ps(load(at + c), log)), by));
        for (int64_t i = row * count; i < (row + 1) * count; i++) at[ids[i]] = narrow(widen(at[ids[i]]) - mass[i]);
    }
}
