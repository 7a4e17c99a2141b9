// Kernels of the cold CIFAR-10 run, compiled by NVRTC while torch is imported. Images are float16, channels-last;
// a thread has eight channels of a pixel (16 bytes). C is 64 or 256.

typedef unsigned char u8;
typedef long long i64;

struct alignas(16) Eight {
    unsigned w[4];
};

static __device__ inline void unpack(unsigned w, float& low, float& high) {
#ifdef __CUDACC_RTC__
    asm("{.reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h;}" : "=f"(low), "=f"(high) : "r"(w));
#else
    host_unpack(w, low, high);
#endif
}

static __device__ inline unsigned pack(float low, float high) {
#ifdef __CUDACC_RTC__
    unsigned w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(high), "f"(low));
    return w;
#else
    return host_pack(low, high);
#endif
}

static __device__ inline float sigmoid(float z) {
#ifdef __CUDACC_RTC__
    float t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(z * 0.5f));
    return t * 0.5f + 0.5f;
#else
    return 1.f / (1.f + expf(-z));
#endif
}

static __device__ inline void load8(const void* x, i64 at, float* v) {
    Eight e = ((const Eight*)x)[at];
#pragma unroll
    for (int k = 0; k < 4; ++k) unpack(e.w[k], v[2 * k], v[2 * k + 1]);
}

static __device__ inline void store8(void* x, i64 at, const float* v) {
    Eight e;
#pragma unroll
    for (int k = 0; k < 4; ++k) e.w[k] = pack(v[2 * k], v[2 * k + 1]);
    ((Eight*)x)[at] = e;
}

// Where a 2 x 2 window of pooled pixel p begins, in pixels of the image [.., H, W].
static __device__ inline unsigned window(unsigned p, unsigned H, unsigned W) {
    unsigned h = H / 2, w = W / 2, column = p % w, above = p / w;
    return ((above / h) * H + 2 * (above % h)) * W + 2 * column;
}

// The largest of a window's four values; `which` has 2 bits for each of eight channels: the first of equals.
static __device__ inline void largest(const void* x, unsigned first, unsigned W, unsigned G, unsigned g, float* v,
                                      unsigned& which) {
    which = 0;
    load8(x, (i64)first * G + g, v);
#pragma unroll
    for (int k = 1; k < 4; ++k) {
        float o[8];
        load8(x, (i64)(first + (k & 1) + (k >> 1) * W) * G + g, o);
#pragma unroll
        for (int c = 0; c < 8; ++c)
            if (o[c] > v[c]) {
                v[c] = o[c];
                which = (which & ~(3u << (2 * c))) | ((unsigned)k << (2 * c));
            }
    }
}

// Add up two sums of each channel over a block of 256 threads and write them to partial [blocks, 2, C].
static __device__ inline void reduce(float* one, float* two, unsigned G, float* partial) {
    __shared__ float held[256 * 8];
    unsigned t = threadIdx.x, C = G * 8;
    for (int turn = 0; turn < 2; ++turn) {
        float* own = turn ? two : one;
        __syncthreads();
#pragma unroll
        for (int c = 0; c < 8; ++c) held[(t / G) * C + (t % G) * 8 + c] = own[c];
        __syncthreads();
        for (unsigned c = t; c < C; c += 256) {
            float sum = 0.f;
            for (unsigned r = 0; r < 256 / G; ++r) sum += held[r * C + c];
            partial[((i64)blockIdx.x * 2 + turn) * C + c] = sum;
        }
    }
}

#ifdef POOL_AND_SUM
template <bool POOL>
static __device__ inline void pool_and_sum(const void* x, void* pooled, unsigned short* which, float* partial,
                                           const float* guess, unsigned pixels, unsigned H, unsigned W, unsigned C) {
    unsigned G = C / 8, g = threadIdx.x % G, rows = 256 / G;
    float one[8] = {}, two[8] = {}, less[8];
    for (int c = 0; c < 8; ++c) less[c] = guess[g * 8 + c];
    for (unsigned p = blockIdx.x * rows + threadIdx.x / G; p < pixels; p += gridDim.x * rows) {
        float v[8];
        if (POOL) {
            unsigned taken;
            largest(x, window(p, H, W), W, G, g, v, taken);
            store8(pooled, (i64)p * G + g, v);
            which[(i64)p * G + g] = (unsigned short)taken;
        } else
            load8(x, (i64)p * G + g, v);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            float d = v[c] - less[c];
            one[c] += d;
            two[c] += d * d;
        }
    }
    reduce(one, two, G, partial);
}
extern "C" __global__ void __launch_bounds__(256)
    pool_and_sum_1(const void* x, void* pooled, unsigned short* which, float* partial, const float* guess,
                   unsigned pixels, unsigned H, unsigned W, unsigned C) {
    pool_and_sum<true>(x, pooled, which, partial, guess, pixels, H, W, C);
}
extern "C" __global__ void __launch_bounds__(256)
    pool_and_sum_0(const void* x, void* pooled, unsigned short* which, float* partial, const float* guess,
                   unsigned pixels, unsigned H, unsigned W, unsigned C) {
    pool_and_sum<false>(x, pooled, which, partial, guess, pixels, H, W, C);
}
#endif

#ifdef ADD_UP
// Sums of partial [rows, 2, C] to out [2, C], a block of 256 threads for each channel; with `statistics` mean and
// 1 / deviation, of sums that are less the running mean, and the running ones are renewed.
extern "C" __global__ void __launch_bounds__(256)
    add_up(const float* partial, float* out, unsigned rows, float pixels, float* mean, float* var, float momentum,
           float eps, unsigned C, int statistics) {
    __shared__ float held[512];
    unsigned t = threadIdx.x, c = blockIdx.x;
    float one = 0.f, two = 0.f;
    for (unsigned r = t; r < rows; r += 256) {
        one += partial[(i64)r * 2 * C + c];
        two += partial[(i64)r * 2 * C + C + c];
    }
    held[t] = one;
    held[256 + t] = two;
    for (unsigned half = 128; half; half /= 2) {
        __syncthreads();
        if (t < half) {
            held[t] += held[t + half];
            held[256 + t] += held[256 + t + half];
        }
    }
    if (t) return;
    one = held[0];
    two = held[256];
    if (statistics) {
        float off = one / pixels, v = fmaxf(two / pixels - off * off, 0.f), old = mean[c];
        mean[c] = old + momentum * off;
        var[c] += momentum * (v * (pixels / (pixels - 1.f)) - var[c]);
        one = old + off;
        two = 1.f / sqrtf(v + eps);
    }
    out[c] = one;
    out[C + c] = two;
}
#endif

#ifdef SCALE_AND_GATE
// silu((x - mean) / deviation + bias); with INFER x is pooled here if POOL, and statistics are mean and variance.
template <bool POOL, bool INFER>
static __device__ inline void scale_and_gate(const void* x, void* out, const float* one, const float* two,
                                             const float* bias, float eps, unsigned pixels, unsigned H, unsigned W,
                                             unsigned C) {
    unsigned G = C / 8, g = threadIdx.x % G, rows = 256 / G;
    float factor[8], shift[8];
    for (int c = 0; c < 8; ++c) {
        float s = two[g * 8 + c];
        factor[c] = INFER ? 1.f / sqrtf(s + eps) : s;
        shift[c] = bias[g * 8 + c] - one[g * 8 + c] * factor[c];
    }
    for (unsigned p = blockIdx.x * rows + threadIdx.x / G; p < pixels; p += gridDim.x * rows) {
        float v[8];
        unsigned taken;
        if (POOL)
            largest(x, window(p, H, W), W, G, g, v, taken);
        else
            load8(x, (i64)p * G + g, v);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            float z = v[c] * factor[c] + shift[c];
            v[c] = z * sigmoid(z);
        }
        store8(out, (i64)p * G + g, v);
    }
}
#define GATE(NAME, POOL, INFER)                                                                                  \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(const void* x, void* out, const float* one, const float* two, const float* bias, float eps,         \
             unsigned pixels, unsigned H, unsigned W, unsigned C) {                                              \
        scale_and_gate<POOL, INFER>(x, out, one, two, bias, eps, pixels, H, W, C);                               \
    }
GATE(scale_and_gate_0, false, false)
GATE(infer_0, false, true)
GATE(infer_1, true, true)
#endif

// (gradient of z, normalised x), z = normal + bias.
static __device__ inline void slope(float value, float dy, float inverse, float shift, float bias, float& d,
                                    float& normal) {
    normal = value * inverse + shift;
    float z = normal + bias, s = sigmoid(z);
    d = dy * (s + z * (s - s * s));
}

#ifdef SLOPE_AND_SUM
extern "C" __global__ void __launch_bounds__(256)
    slope_and_sum(const void* x, const void* gradient, const float* statistics, const float* bias, float* partial,
                  unsigned pixels, unsigned C) {
    unsigned G = C / 8, g = threadIdx.x % G, rows = 256 / G;
    float one[8] = {}, two[8] = {}, inverse[8], shift[8], own[8];
    for (int c = 0; c < 8; ++c) {
        inverse[c] = statistics[C + g * 8 + c];
        shift[c] = -statistics[g * 8 + c] * inverse[c];
        own[c] = bias[g * 8 + c];
    }
    for (unsigned p = blockIdx.x * rows + threadIdx.x / G; p < pixels; p += gridDim.x * rows) {
        float v[8], dy[8];
        load8(x, (i64)p * G + g, v);
        load8(gradient, (i64)p * G + g, dy);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            float d, normal;
            slope(v[c], dy[c], inverse[c], shift[c], own[c], d, normal);
            one[c] += d;
            two[c] += d * normal;
        }
    }
    reduce(one, two, G, partial);
}
#endif

#ifdef SLOPE_AND_SCATTER
// The gradient of what was pooled: the norm's at each window's largest value, zero elsewhere; odd borders get zeros.
template <bool POOL>
static __device__ inline void slope_and_scatter(const void* x, const void* gradient, const float* statistics,
                                                const float* bias, const float* sums, const unsigned short* which,
                                                void* out, unsigned windows, float pixels, unsigned H, unsigned W,
                                                unsigned C) {
    unsigned G = C / 8, g = threadIdx.x % G, rows = 256 / G;
    float inverse[8], shift[8], own[8], one[8], two[8];
    for (int c = 0; c < 8; ++c) {
        inverse[c] = statistics[C + g * 8 + c];
        shift[c] = -statistics[g * 8 + c] * inverse[c];
        own[c] = bias[g * 8 + c];
        one[c] = sums[g * 8 + c] / pixels;
        two[c] = sums[C + g * 8 + c] / pixels;
    }
    for (unsigned p = blockIdx.x * rows + threadIdx.x / G; p < windows; p += gridDim.x * rows) {
        unsigned q = p, h = H / 2, w = W / 2, row = 0, column = 0, image = 0;
        bool whole = true;
        if (POOL) {
            unsigned ww = (W + 1) / 2, hh = (H + 1) / 2, above = p / ww;
            column = p % ww;
            row = above % hh;
            image = above / hh;
            whole = row < h && column < w;
            q = (image * h + row) * w + column;
        }
        float v[8] = {};
        unsigned taken = 0;
        if (whole) {
            float dy[8];
            load8(x, (i64)q * G + g, v);
            load8(gradient, (i64)q * G + g, dy);
            if (POOL) taken = which[(i64)q * G + g];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                float d, normal;
                slope(v[c], dy[c], inverse[c], shift[c], own[c], d, normal);
                v[c] = inverse[c] * (d - one[c] - normal * two[c]);
            }
        }
        if (!POOL) {
            store8(out, (i64)p * G + g, v);
            continue;
        }
        unsigned first = (image * H + 2 * row) * W + 2 * column;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (2 * column + (k & 1) >= W || 2 * row + (k >> 1) >= H) continue;
            float part[8];
#pragma unroll
            for (int c = 0; c < 8; ++c) part[c] = ((taken >> (2 * c)) & 3u) == (unsigned)k ? v[c] : 0.f;
            store8(out, (i64)(first + (k & 1) + (k >> 1) * W) * G + g, part);
        }
    }
}
#define SCATTER(NAME, POOL)                                                                                      \
    extern "C" __global__ void __launch_bounds__(256)                                                            \
        NAME(const void* x, const void* gradient, const float* statistics, const float* bias, const float* sums, \
             const unsigned short* which, void* out, unsigned windows, float pixels, unsigned H, unsigned W,     \
             unsigned C) {                                                                                       \
        slope_and_scatter<POOL>(x, gradient, statistics, bias, sums, which, out, windows, pixels, H, W, C);      \
    }
SCATTER(slope_and_scatter_0, false)
SCATTER(slope_and_scatter_1, true)
#endif

#ifdef FILTERED
static __device__ inline int reflect(int at, int size) {
    at = at < 0 ? -at : at;
    return at >= size ? 2 * (size - 1) - at : at;
}

// silu of a 2 x 2 convolution of augmented uint8 images [.., S, S, 3]: a thread has one pixel and all 32 filters.
// index [B], moves [B, 3]: rows down, columns right, whether turned; tone [B, 2, 3]: x * tone[0] + tone[1].
extern "C" __global__ void __launch_bounds__(128)
    filtered(const u8* images, const i64* index, const int* moves, const float* tone, const float* filters, void* out,
             unsigned S) {
    __shared__ float w[32 * 12];
    for (int k = threadIdx.x; k < 32 * 12; k += 128) w[k] = filters[k];
    __syncthreads();
    unsigned b = blockIdx.y, s = S - 1, p = blockIdx.x * 128 + threadIdx.x;
    if (p >= s * s) return;
    const u8* image = images + index[b] * S * S * 3;
    float x[12];
    for (int k = 0; k < 4; ++k) {
        int row = reflect((int)(p / s) + (k >> 1) + moves[b * 3], S), column = p % s + (k & 1);
        if (moves[b * 3 + 2]) column = S - 1 - column;
        column = reflect(column + moves[b * 3 + 1], S);
        for (int c = 0; c < 3; ++c) {
            float v = image[(row * S + column) * 3 + c] * tone[b * 6 + c] + tone[b * 6 + 3 + c], same;
            unpack(pack(v, 0.f), x[k * 3 + c], same);
        }
    }
    i64 at = ((i64)b * s * s + p) * 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float v[8];
#pragma unroll
        for (int o = 0; o < 8; ++o) {
            float sum = 0.f;
#pragma unroll
            for (int i = 0; i < 12; ++i) sum += x[i] * w[(j * 8 + o) * 12 + i];
            v[o] = sum * sigmoid(sum);
        }
        store8(out, at + j, v);
    }
}
#endif
