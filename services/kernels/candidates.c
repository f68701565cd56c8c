// The best k of each row of logits, and the log of the row's mass, for x86 with AVX-512. See candidates.py.
//
// A row is read once: against the k-th best so far, which few entries pass after the first hundreds, and into the sum of
// exponentials below the best so far. Compiled for bfloat16 (BF16=1) or float32.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define LANES 16
#define PARTS 4  // vectors that are compared at once

#if BF16
typedef uint16_t logit;
static inline float wide(logit x) {
    union { uint32_t bits; float value; } y = {(uint32_t)x << 16};
    return y.value;
}
static inline __m512 load(const logit *x, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}
#else
typedef float logit;
static inline float wide(logit x) { return x; }
static inline __m512 load(const logit *x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
#endif

// 2^x, relative error below 2e-7: the minimax polynomial of degree 5 for the fraction, which is 0 for infinities.
static inline __m512 exp2_512(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x)
    __m512 y = _mm512_set1_ps(1.87757668e-3f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(8.98934028e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.58263177e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.40153617e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.93153073e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.99999925e-1f));
    return _mm512_scalef_ps(y, x);  // y * 2^floor(x)
}

static inline __mmask16 lanes(int64_t left) { return left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1); }

// Puts (value, id) among the first `filled` entries, best first, after those that equal it; the last of k falls out.
static inline void insert(float *values, int64_t *ids, int filled, int k, float value, int64_t id) {
    int at = filled < k ? filled : k - 1;
    for (; at > 0 && values[at - 1] < value; at--) {
        values[at] = values[at - 1];
        ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
}

// Inserts what beats the k-th best among the (up to LANES) entries from `at` on.
static inline void offer(const logit *row, int64_t at, __mmask16 valid, int k, float *values, int64_t *ids) {
    __mmask16 above = _mm512_mask_cmp_ps_mask(valid, load(row + at, valid), _mm512_set1_ps(values[k - 1]), _CMP_GT_OQ);
    for (; above; above &= above - 1) {
        const int64_t id = at + __builtin_ctz(above);
        if (wide(row[id]) > values[k - 1]) insert(values, ids, k, k, wide(row[id]), id);
    }
}

// The sum of exponentials so far, below `base`.
typedef struct { __m512 sums[PARTS]; float base; } mass;

static inline void add(mass *m, int part, __mmask16 valid, __m512 x) {
    x = _mm512_mul_ps(_mm512_sub_ps(x, _mm512_set1_ps(m->base)), _mm512_set1_ps(1.44269504f));
    m->sums[part] = _mm512_mask_add_ps(m->sums[part], valid, m->sums[part], exp2_512(x));
}

static inline void raise_to(mass *m, float base) {
    if (base <= m->base) return;
    const __m512 by = _mm512_set1_ps(expf(m->base - base));
    for (int part = 0; part < PARTS; part++) m->sums[part] = _mm512_mul_ps(m->sums[part], by);
    m->base = base;
}

// Fills values and ids [k] of one row, and returns the log of its mass.
static float scan(const logit *row, int64_t size, int k, float *values, int64_t *ids) {
    mass m = {.base = -3.0e38f};
    for (int i = 0; i < k; i++) insert(values, ids, i, k, wide(row[i]), i);
    raise_to(&m, values[0]);
    for (int i = 0; i < k; i += LANES) add(&m, 0, lanes(k - i), load(row + i, lanes(k - i)));
    int64_t i = k;
    for (; i + PARTS * LANES <= size; i += PARTS * LANES) {
        __m512 x[PARTS], top = _mm512_set1_ps(values[k - 1]);
        for (int part = 0; part < PARTS; part++) x[part] = load(row + i + part * LANES, 0xffff);
        const __m512 most = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
        if (_mm512_cmp_ps_mask(most, top, _CMP_GT_OQ)) {
            for (int part = 0; part < PARTS; part++) offer(row, i + part * LANES, 0xffff, k, values, ids);
            raise_to(&m, values[0]);
        }
        for (int part = 0; part < PARTS; part++) add(&m, part, 0xffff, x[part]);
    }
    for (; i < size; i += LANES) {
        offer(row, i, lanes(size - i), k, values, ids);
        raise_to(&m, values[0]);
        add(&m, 0, lanes(size - i), load(row + i, lanes(size - i)));
    }
    const __m512 sums = _mm512_add_ps(_mm512_add_ps(m.sums[0], m.sums[1]), _mm512_add_ps(m.sums[2], m.sums[3]));
    return m.base + logf(_mm512_reduce_add_ps(sums));
}

// logits [n, stride] of which `size` a row; values and ids [n, k], total [n].
void candidates(const logit *logits, int64_t n, int64_t stride, int64_t size, int k, float *values, int64_t *ids,
                float *total, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; i++) total[i] = scan(logits + i * stride, size, k, values + i * k, ids + i * k);
}
