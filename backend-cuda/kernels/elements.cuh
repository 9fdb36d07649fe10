// The types of elements, and how words of them are combined. reduce.cu and start.cu include this file.
//
// All words are combined with `flip` by an exclusive or when they are loaded and when they are stored. This turns signed integers into
// unsigned ones of the same order, and the smallest value into the largest one. For sums, `flip` is 0. A sum of floating-point numbers is
// multiplied by the inverse of `divisor`.

#pragma once

#include <cmath>
#include <cstdint>

#include "device.cuh"

// The vectors of 16 bytes that a thread loads from a source before it uses them.
constexpr int LOADS = 4;

// `MAXIMUM` is NaN if any value is; `MAX` prefers a number.
enum Operator { SUM, MAX, MAXIMUM };

static __device__ float largest(float a, float b) { return fmaxf(a, b); }
static __device__ double largest(double a, double b) { return fmax(a, b); }
template <typename T> static __device__ T largest(T a, T b) { return a > b ? a : b; }
// A comparison with a NaN is false, so `b` is taken if it is a NaN.
template <typename T> static __device__ T maximum(T a, T b) { return a > b || a != a ? a : b; }

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
        if (sizeof(T) == 1) return OPERATOR == SUM ? add_bytes(a, b) : max_bytes(a, b);
        return OPERATOR == SUM ? add_shorts(a, b) : max_shorts(a, b);
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
    template <Operator OPERATOR> static __device__ Sum start() {
        return OPERATOR == SUM ? T(-0.0) : OPERATOR == MAX ? T(NAN) : T(-INFINITY);
    }
    template <Operator OPERATOR> static __device__ Sum add(Sum a, Sum b) {
        return OPERATOR == SUM ? a + b : OPERATOR == MAX ? largest(a, b) : maximum(a, b);
    }
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
