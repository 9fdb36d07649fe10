// Combines arrays element by element, in the order of the sources, as `peerlane_hal::Reduction` does on the processor.
//
// `cargo xtask kernels` generates reduce.ptx from this file. There is a kernel for the sum and one for the largest value of the elements of
// each size, for integers and for floating-point numbers; elements.cuh says how they are combined.

#include "elements.cuh"

constexpr int SOURCES_MAX = 128;

struct Sources {
    const void *at[SOURCES_MAX];
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
                loaded[i] = load_once(static_cast<const uint4 *>(sources.at[n]) + (index < vectors ? index : begin));
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
            store_once(static_cast<uint4 *>(target) + index, *reinterpret_cast<uint4 *>(&result));
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
#define FLOATS(name, type) KERNELS(name, type) KERNEL(maximum_##name, type, MAXIMUM)

KERNELS(u8, Packed<uint8_t>)
KERNELS(u16, Packed<uint16_t>)
KERNELS(u32, Integer<uint32_t>)
KERNELS(u64, Integer<uint64_t>)
FLOATS(f16, Short<Half>)
FLOATS(bf16, Short<BFloat>)
FLOATS(f32, Float<float>)
FLOATS(f64, Float<double>)
