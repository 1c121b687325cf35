// One optimizer step of a tile on the device: the bits of the host kernels (offload/kernels/adamw.py, sign_sgd.py).
//
// Every operation is a single-rounding intrinsic, in the order of the host's formula; denormals are flushed where the
// compiler is given --ftz=true. Compiled by NVRTC, so nothing is included. Defined by the caller, per variant:
//   ADAMW            1: AdamW, 0: sign SGD
//   GRAD_BF16        the gradient is BF16, else FP32
//   HAS_ACC          earlier micro-batches are in acc
//   WEIGHT           0: none, 1: BF16, 2: FP32
//   HAS_SUMS         squared norms are written
//   UPDATE           0: nothing but the squared norms (default 1)
//   NUM_COLUMNS      of rows
//   BLOCK_THREADS    threads per block: a warp for each norm block of 1024 elements
//   KERNEL           the kernel's name

#ifndef UPDATE
#define UPDATE 1
#endif

#define NORM_BLOCK 1024
#define LANES 32
#define UNROLL 4  // loads in flight per thread
#define ALL_LANES 0xffffffffu
#define EXPONENT 0x7f800000u

static __device__ __forceinline__ float widen(unsigned short bits) {
    return __uint_as_float((unsigned int)bits << 16);
}

// Round to nearest, ties to even; every NaN is 0x7fc0.
static __device__ __forceinline__ unsigned short round_bf16(float value) {
    unsigned int bits = __float_as_uint(value);
    bool nan = (bits & 0x7fffffffu) > EXPONENT;
    return nan ? 0x7fc0 : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if GRAD_BF16
typedef unsigned short Grad;
static __device__ __forceinline__ float read(Grad grad) { return widen(grad); }
#else
typedef float Grad;
static __device__ __forceinline__ float read(Grad grad) { return grad; }
#endif

#if WEIGHT == 1
typedef unsigned short Weight;
static __device__ __forceinline__ Weight to_weight(float p) { return round_bf16(p); }
#else
typedef float Weight;
static __device__ __forceinline__ Weight to_weight(float p) { return p; }
#endif

// The parameter's row of hyperparameters: offload.kernels.adamw.hyper_row, offload.kernels.sign_sgd.hyper_row.
#if ADAMW
struct Hyper { float lerp, square, beta2, decay, step_size, debias, eps, coef; };
#else
struct Hyper { float decay, step_size, coef; };
#endif

static __device__ __forceinline__ float step(float g, float p, float& m, float& v, const Hyper& h) {
#if ADAMW
    bool near = h.lerp < 0.5f;
    float slope = near ? h.lerp : __fsub_rn(h.lerp, 1.0f);
    m = __fmaf_rn(slope, __fsub_rn(g, m), near ? m : g);
    v = __fmaf_rn(__fmul_rn(h.square, g), g, __fmul_rn(v, h.beta2));
    float denominator = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), h.debias), h.eps);
    return __fadd_rn(__fmul_rn(p, h.decay), __fdiv_rn(__fmul_rn(h.step_size, m), denominator));
#else
    float sign = g > 0.0f ? 1.0f : g < 0.0f ? -1.0f : g == 0.0f ? 0.0f : g;  // NaN stays
    return __fadd_rn(__fmul_rn(p, h.decay), __fmul_rn(h.step_size, sign));
#endif
}

// The 32 lanes of a norm block are the lanes of a warp; added 16, 8, 4, 2, 1 apart, as on the host.
static __device__ __forceinline__ void write_sums(double lane_sum, unsigned int top, double* sum, unsigned char* nonfinite) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        lane_sum = __dadd_rn(lane_sum, __shfl_down_sync(ALL_LANES, lane_sum, distance));
    bool any = __any_sync(ALL_LANES, top == EXPONENT);
    if (threadIdx.x % LANES == 0) {
        *sum = lane_sum;
        *nonfinite = any;
    }
}

// Grid: (blocks of the tile, parts of the largest block). Arguments that a variant lacks are not read.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) KERNEL(
    const Grad* __restrict__ grad, const float* __restrict__ acc, float* __restrict__ master,
    float* __restrict__ exp_avg, float* __restrict__ exp_avg_sq, Weight* __restrict__ weight,
    double* __restrict__ sums, unsigned char* __restrict__ nonfinite, const long long* __restrict__ blocks,
    const float* __restrict__ rows, const unsigned char* __restrict__ select) {
    const long long* block = blocks + 3 * (long long)blockIdx.x;
    long long row = block[2];
    long long warp = (long long)blockIdx.y * (BLOCK_THREADS / LANES) + threadIdx.x / LANES;
    long long start = block[0] + warp * NORM_BLOCK;
    long long stop = min(start + NORM_BLOCK, block[1]);
    if (start >= stop || !select[row]) return;  // alike in the whole warp
#if UPDATE
    Hyper hyper = *(const Hyper*)(rows + row * NUM_COLUMNS);
#endif

    double lane_sum = 0.0;
    unsigned int top = 0;
    for (long long base = start + threadIdx.x % LANES; base < stop; base += LANES * UNROLL) {
        float g[UNROLL], p[UNROLL], m[UNROLL], v[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            long long i = base + k * LANES;
            if (i >= stop) continue;
            g[k] = read(grad[i]);
#if HAS_ACC
            g[k] = __fadd_rn(acc[i], g[k]);
#endif
#if UPDATE
            p[k] = master[i];
#endif
#if UPDATE && ADAMW
            m[k] = exp_avg[i];
            v[k] = exp_avg_sq[i];
#endif
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            long long i = base + k * LANES;
            if (i >= stop) continue;
#if HAS_SUMS
            double value = (double)g[k];
            lane_sum = __dadd_rn(lane_sum, __dmul_rn(value, value));
            top = max(top, __float_as_uint(g[k]) & EXPONENT);
#endif
#if UPDATE
            p[k] = step(__fmul_rn(g[k], hyper.coef), p[k], m[k], v[k], hyper);
            master[i] = p[k];
#endif
#if UPDATE && ADAMW
            exp_avg[i] = m[k];
            exp_avg_sq[i] = v[k];
#endif
#if UPDATE && WEIGHT
            weight[i] = to_weight(p[k]);
#endif
        }
    }
#if HAS_SUMS
    write_sums(lane_sum, top, sums + start / NORM_BLOCK, nonfinite + start / NORM_BLOCK);
#endif
}
