// What the kernels need of a device beside C++: for NVIDIA GPUs if nvcc compiles them, and for AMD GPUs if clang compiles them as HIP.
//
// The PTX in the tree is generated with the first half. `cargo xtask kernels --hip` compiles the second one, which has never run on an AMD
// GPU. Nothing but launch bounds depends on the number of threads in a warp or wave.

#pragma once

#include <cstdint>

// Two words of 8 bytes.
struct Halves {
    uint64_t low, high;
};

#if !defined(__HIP__)

#include <cuda_fp16.h>

// The bounds of a kernel of which `blocks` blocks fit on a multiprocessor.
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

// Loads and stores what this device does not use again soon.
template <typename T> static __device__ __forceinline__ T load_once(const T *from) { return __ldcs(from); }
template <typename T> static __device__ __forceinline__ void store_once(T *to, T value) { __stcs(to, value); }

// Loads and stores two words that peers access at the same time. Each word is atomic, but not both together, and nothing is ordered.
static __device__ __forceinline__ Halves load_halves(uint64_t from) {
    Halves halves;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(halves.low), "=l"(halves.high) : "l"(from) : "memory");
    return halves;
}
static __device__ __forceinline__ void store_halves(uint64_t to, Halves halves) {
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(halves.low), "l"(halves.high) : "memory");
}

// Loads a flag that a peer stores. What the peer has stored before it is visible behind the load.
static __device__ __forceinline__ uint64_t load_flag(uint64_t from) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}
// Stores a flag, without order.
static __device__ __forceinline__ void store_flag(uint64_t to, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// Orders what this thread, and the others of its block ahead of a barrier, have stored before the flags that it stores next.
static __device__ __forceinline__ void fence_for_peers() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
// Each thread calls this ahead of the barrier before `fence_for_peers`. Here barriers are cumulative.
static __device__ __forceinline__ void fence_for_barrier() {}

// A barrier of the block that returns whether the value is true for any thread.
static __device__ __forceinline__ bool any_of_block(bool value) { return __syncthreads_or(value); }

// Makes the compiler forget what it knows of values, which are the same ones in all threads of a block.
static __device__ __forceinline__ void forget(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
    asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));
}
static __device__ __forceinline__ void forget(uint64_t &a, uint64_t &b) { asm volatile("" : "+l"(a), "+l"(b)); }

// Four integers of one byte, or two of two bytes.
static __device__ uint32_t add_bytes(uint32_t a, uint32_t b) { return __vadd4(a, b); }
static __device__ uint32_t max_bytes(uint32_t a, uint32_t b) { return __vmaxu4(a, b); }
static __device__ uint32_t add_shorts(uint32_t a, uint32_t b) { return __vadd2(a, b); }
static __device__ uint32_t max_shorts(uint32_t a, uint32_t b) { return __vmaxu2(a, b); }

#else

#include <hip/hip_fp16.h>
#include <hip/hip_runtime.h>

// Parameters of kernels are in constant memory without it.
#if !defined(__grid_constant__)
#define __grid_constant__
#endif

// Here the second bound is the number of waves on each of the four SIMD units.
#if defined(__GFX9__)
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, (threads) * (blocks) / (4 * 64))
#else
#define LAUNCH_BOUNDS(threads, blocks) __launch_bounds__(threads, (threads) * (blocks) / (4 * 32))
#endif

// Only scalars and the compiler's own vectors can be loaded in this way.
template <typename T> struct Plain {
    using Type = T;
};
template <> struct Plain<uint4> {
    using Type = uint32_t __attribute__((ext_vector_type(4)));
};

template <typename T> static __device__ __forceinline__ T load_once(const T *from) {
    const auto loaded = __builtin_nontemporal_load(reinterpret_cast<const typename Plain<T>::Type *>(from));
    return reinterpret_cast<const T &>(loaded);
}
template <typename T> static __device__ __forceinline__ void store_once(T *to, T value) {
    using Type = typename Plain<T>::Type;
    __builtin_nontemporal_store(reinterpret_cast<const Type &>(value), reinterpret_cast<Type *>(to));
}

// A word in memory of a device. The address space saves the choice between kinds of memory at run time.
using Word64 = uint64_t __attribute__((address_space(1)));
static __device__ __forceinline__ Word64 *word_at(uint64_t address) { return reinterpret_cast<Word64 *>(address); }

// There is no atomic access to 16 bytes. Two of 8 bytes are enough, since only these are taken for atomic.
static __device__ __forceinline__ Halves load_halves(uint64_t from) {
    Halves halves;
    halves.low = __hip_atomic_load(word_at(from), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    halves.high = __hip_atomic_load(word_at(from + 8), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    return halves;
}
static __device__ __forceinline__ void store_halves(uint64_t to, Halves halves) {
    __hip_atomic_store(word_at(to), halves.low, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    __hip_atomic_store(word_at(to + 8), halves.high, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

static __device__ __forceinline__ uint64_t load_flag(uint64_t from) {
    return __hip_atomic_load(word_at(from), __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
static __device__ __forceinline__ void store_flag(uint64_t to, uint64_t value) {
    __hip_atomic_store(word_at(to), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

static __device__ __forceinline__ void fence_for_peers() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
#if defined(__GFX9__)
    // If the wave has no stores in flight, compilers before llvm/llvm-project#178316 do not wait until the caches are written back.
    asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#endif
}
// On gfx9, a barrier does not wait for stores, and a fence waits only for those of its own wave.
static __device__ __forceinline__ void fence_for_barrier() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }

static __device__ __forceinline__ bool any_of_block(bool value) {
    __shared__ uint32_t any;
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (value) __hip_atomic_store(&any, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    __syncthreads();
    const bool result = any != 0;
    // The next call sets the word to 0.
    __syncthreads();
    return result;
}

// The values are in scalar registers, as all threads share them.
static __device__ __forceinline__ void forget(uint32_t &value) {
    value = __builtin_amdgcn_readfirstlane(value);
    asm volatile("" : "+s"(value));
}
static __device__ __forceinline__ void forget(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
    forget(a), forget(b), forget(c), forget(d);
}
static __device__ __forceinline__ void forget(uint64_t &a, uint64_t &b) {
    uint32_t words[4] = {uint32_t(a), uint32_t(a >> 32), uint32_t(b), uint32_t(b >> 32)};
    forget(words[0], words[1], words[2], words[3]);
    a = uint64_t(words[1]) << 32 | words[0];
    b = uint64_t(words[3]) << 32 | words[2];
}

// The compiler combines these with packed instructions where there are any.
using Bytes = uint8_t __attribute__((ext_vector_type(4)));
using Shorts = uint16_t __attribute__((ext_vector_type(2)));
template <typename V> static __device__ V lanes(uint32_t word) { return __builtin_bit_cast(V, word); }
template <typename V> static __device__ uint32_t word_of(V lanes) { return __builtin_bit_cast(uint32_t, lanes); }
template <typename V> static __device__ uint32_t add_lanes(uint32_t a, uint32_t b) { return word_of<V>(lanes<V>(a) + lanes<V>(b)); }
template <typename V> static __device__ uint32_t max_lanes(uint32_t a, uint32_t b) {
    return word_of<V>(__builtin_elementwise_max(lanes<V>(a), lanes<V>(b)));
}
static __device__ uint32_t add_bytes(uint32_t a, uint32_t b) { return add_lanes<Bytes>(a, b); }
static __device__ uint32_t max_bytes(uint32_t a, uint32_t b) { return max_lanes<Bytes>(a, b); }
static __device__ uint32_t add_shorts(uint32_t a, uint32_t b) { return add_lanes<Shorts>(a, b); }
static __device__ uint32_t max_shorts(uint32_t a, uint32_t b) { return max_lanes<Shorts>(a, b); }

#endif
