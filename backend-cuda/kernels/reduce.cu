// Combines arrays element by element, in the order of the sources, as `peerlane_hal::Reduction` does on the processor.
//
// `cargo xtask kernels` generates reduce.ptx from this file. There is a kernel for the sum and one for the largest value of the elements of
// each size, for integers and for floating-point numbers. All words are combined with `flip` by an exclusive or when they are loaded
// and when they are stored. This turns signed integers into unsigned ones of the same order, and the smallest value into the largest one.
// A sum of floating-point numbers is multiplied by the inverse of `divisor`.

#include <cmath>
#include <cstdint>
#include <cuda_fp16.h>

constexpr int SOURCES_MAX = 128;
// The vectors of 16 bytes that a thread loads from a source before it uses them.
constexpr int LOADS = 4;

struct Sources {
    const void *at[SOURCES_MAX];
};

enum Operator { SUM, MAX };

static __device__ float largest(float a, float b) { return fmaxf(a, b); }
static __device__ double largest(double a, double b) { return fmax(a, b); }
template <typename T> static __device__ T largest(T a, T b) { return a > b ? a : b; }

// How a word of elements is accumulated. `start` plus a value, or the largest of both, is the value.

template <typename T> struct Integer {
    using Element = T;
    using Word = T;
    using Sum = T;
    using Scale = float;
    static __device__ Sum widen(Word word) { return word; }
    static __device__ Word narrow(Sum sum) { return sum; }
    template <Operator> static __device__ Sum start() { return 0; }
    template <Operator OPERATOR> static __device__ Sum add(Sum a, Sum b) { return OPERATOR == SUM ? a + b : largest(a, b); }
    static __device__ Sum scale(Sum sum, float) { return sum; }
};

// Integers of one or two bytes stay packed.
template <typename T> struct Packed : Integer<uint32_t> {
    using Element = T;
    template <Operator OPERATOR> static __device__ uint32_t add(uint32_t a, uint32_t b) {
        if (sizeof(T) == 1) return OPERATOR == SUM ? __vadd4(a, b) : __vmaxu4(a, b);
        return OPERATOR == SUM ? __vadd2(a, b) : __vmaxu2(a, b);
    }
};

template <typename T> struct Bits;
template <> struct Bits<float> {
    using Word = uint32_t;
    static __device__ float widen(Word word) { return __uint_as_float(word); }
    static __device__ Word narrow(float value) { return __float_as_uint(value); }
};
template <> struct Bits<double> {
    using Word = uint64_t;
    static __device__ double widen(Word word) { return __longlong_as_double(word); }
    static __device__ Word narrow(double value) { return __double_as_longlong(value); }
};

template <typename T> struct Float : Bits<T> {
    using Element = typename Bits<T>::Word;
    using Sum = T;
    using Scale = T;
    template <Operator OPERATOR> static __device__ Sum start() { return OPERATOR == SUM ? T(-0.0) : T(NAN); }
    template <Operator OPERATOR> static __device__ Sum add(Sum a, Sum b) { return OPERATOR == SUM ? a + b : largest(a, b); }
    static __device__ Sum scale(Sum sum, T by) { return sum * by; }
};

struct Half {
    static __device__ float widen(uint16_t bits) { return __half2float(__ushort_as_half(bits)); }
    static __device__ uint16_t narrow(float value) { return __half_as_ushort(__float2half_rn(value)); }
};

struct BFloat {
    static __device__ float widen(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
    // Rounds to the nearest number, and to the even one of two. A NaN stays a NaN.
    static __device__ uint16_t narrow(float value) {
        uint32_t bits = __float_as_uint(value);
        uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
        return uint16_t((value != value ? bits | 0x400000 : rounded) >> 16);
    }
};

// Two floating-point numbers of two bytes are accumulated as two of four bytes.
template <typename T> struct Short {
    using One = Float<float>;
    using Element = uint16_t;
    using Word = uint32_t;
    using Sum = float2;
    using Scale = float;
    static __device__ Sum widen(Word word) { return make_float2(T::widen(uint16_t(word)), T::widen(uint16_t(word >> 16))); }
    static __device__ Word narrow(Sum sum) { return uint32_t(T::narrow(sum.y)) << 16 | T::narrow(sum.x); }
    template <Operator OPERATOR> static __device__ Sum start() {
        return make_float2(One::start<OPERATOR>(), One::start<OPERATOR>());
    }
    template <Operator OPERATOR> static __device__ Sum add(Sum a, Sum b) {
        return make_float2(One::add<OPERATOR>(a.x, b.x), One::add<OPERATOR>(a.y, b.y));
    }
    static __device__ Sum scale(Sum sum, float by) { return make_float2(sum.x * by, sum.y * by); }
};

template <typename Word> struct alignas(16) Vector {
    Word words[16 / sizeof(Word)];
};

template <typename T, Operator OPERATOR>
static __device__ void reduce(
    void *target, const Sources &sources, uint32_t number, uint32_t divisor, uint64_t flips, uint64_t count) {
    using Sum = typename T::Sum;
    using Word = typename T::Word;
    using Element = typename T::Element;
    using Scale = typename T::Scale;
    constexpr int WORDS = 16 / sizeof(Word);
    const Word flip = Word(flips);
    const Scale by = Scale(1) / Scale(divisor);
    const uint64_t thread = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;

    uint64_t places = reinterpret_cast<uint64_t>(target);
#pragma unroll 1
    for (uint32_t n = 0; n < number; n++) places |= reinterpret_cast<uint64_t>(sources.at[n]);
    const uint64_t vectors = places % 16 == 0 ? count * sizeof(Element) / 16 : 0;
#pragma unroll 1
    for (uint64_t begin = thread; begin < vectors; begin += LOADS * threads) {
        Sum sums[LOADS][WORDS];
#pragma unroll
        for (int i = 0; i < LOADS; i++)
#pragma unroll
            for (int w = 0; w < WORDS; w++) sums[i][w] = T::template start<OPERATOR>();
#pragma unroll 1
        for (uint32_t n = 0; n < number; n++) {
            uint4 loaded[LOADS];
#pragma unroll
            for (int i = 0; i < LOADS; i++) {
                // A thread at the end loads its first vector again.
                uint64_t index = begin + i * threads;
                loaded[i] = __ldcs(static_cast<const uint4 *>(sources.at[n]) + (index < vectors ? index : begin));
            }
#pragma unroll
            for (int i = 0; i < LOADS; i++)
#pragma unroll
                for (int w = 0; w < WORDS; w++) {
                    Sum value = T::widen(reinterpret_cast<Vector<Word> *>(&loaded[i])->words[w] ^ flip);
                    sums[i][w] = T::template add<OPERATOR>(sums[i][w], value);
                }
        }
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            uint64_t index = begin + i * threads;
            if (index >= vectors) break;
            Vector<Word> result;
#pragma unroll
            for (int w = 0; w < WORDS; w++) {
                Sum sum = OPERATOR == SUM ? T::scale(sums[i][w], by) : sums[i][w];
                result.words[w] = T::narrow(sum) ^ flip;
            }
            __stcs(static_cast<uint4 *>(target) + index, *reinterpret_cast<uint4 *>(&result));
        }
    }

#pragma unroll 1
    for (uint64_t index = vectors * 16 / sizeof(Element) + thread; index < count; index += threads) {
        Sum sum = T::template start<OPERATOR>();
#pragma unroll 1
        for (uint32_t n = 0; n < number; n++) {
            Sum value = T::widen(Word(static_cast<const Element *>(sources.at[n])[index]) ^ flip);
            sum = T::template add<OPERATOR>(sum, value);
        }
        if (OPERATOR == SUM) sum = T::scale(sum, by);
        static_cast<Element *>(target)[index] = Element(T::narrow(sum) ^ flip);
    }
}

#define KERNEL(name, type, op)                                                                                         \
    extern "C" __global__ void __launch_bounds__(512) reduce_##name(                                                   \
        void *target, const __grid_constant__ Sources sources, uint32_t number, uint32_t divisor, uint64_t flip,       \
        uint64_t count) {                                                                                              \
        reduce<type, op>(target, sources, number, divisor, flip, count);                                               \
    }
#define KERNELS(name, type) KERNEL(sum_##name, type, SUM) KERNEL(max_##name, type, MAX)

KERNELS(u8, Packed<uint8_t>)
KERNELS(u16, Packed<uint16_t>)
KERNELS(u32, Integer<uint32_t>)
KERNELS(u64, Integer<uint64_t>)
KERNELS(f16, Short<Half>)
KERNELS(bf16, Short<BFloat>)
KERNELS(f32, Float<float>)
KERNELS(f64, Float<double>)
