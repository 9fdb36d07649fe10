//! Combines arrays element by element, on the processor.
//!
//! The order of the sources is given, so a result is equal in every run, bit by bit. Sums of `f16`
//! and `bf16` are accumulated in `f32` and rounded once.

use std::fmt;
use std::str::FromStr;

use crate::element::{DType, UnknownName};

/// The operator that combines the elements of a reduction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(not(peerlane_workspace), non_exhaustive)]
pub enum Operator {
    /// The sum. Integers wrap around.
    #[default]
    Sum,
    /// The largest value. A number is preferred to a NaN.
    Max,
    /// The smallest value. A number is preferred to a NaN.
    Min,
    /// The sum divided by the number of sources, for floating-point numbers.
    ///
    /// The sum comes first, so a result is infinite where the sum is, although the average is not:
    /// beyond 3.4e38 for `f32` and `bf16`, and 1.8e308 for `f64`. Sums of `f16` are far from that.
    Average,
    /// The largest value, or NaN if any value is NaN, as the `maximum` of IEEE 754, NumPy and
    /// PyTorch. It is [`Max`](Self::Max) for integers.
    Maximum,
    /// The smallest value, or NaN if any value is NaN, as the `minimum` of IEEE 754, NumPy and
    /// PyTorch. It is [`Min`](Self::Min) for integers.
    Minimum,
}

impl Operator {
    /// All operators, in the order of their declaration.
    pub const ALL: [Self; 6] =
        [Self::Sum, Self::Max, Self::Min, Self::Average, Self::Maximum, Self::Minimum];

    /// Returns the name of the operator, which [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
            Self::Average => "average",
            Self::Maximum => "maximum",
            Self::Minimum => "minimum",
        }
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Operator {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|operator| operator.name() == text);
        found.ok_or_else(|| UnknownName::new("operator", text, &Self::ALL.map(Self::name)))
    }
}

/// An operator on the elements of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reduction {
    operator: Operator,
    dtype: DType,
}

/// An error that says why a type of elements has no such reduction.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoReduction {
    /// The type has no arithmetic, as 8-bit floating-point numbers and complex numbers.
    #[error("dtype is {0}, expected an integer, f16, bf16, f32 or f64 in a reduction")]
    Elements(DType),
    /// Integers of this type have no average.
    #[error("operator is average for dtype {0}, expected sum, max or min for integers")]
    Average(DType),
}

/// The accumulators of this many elements stay in the first-level cache.
const BLOCK: usize = 512;

impl Reduction {
    /// Creates the reduction of elements of a type by an operator.
    ///
    /// # Errors
    /// Returns [`NoReduction`] for 8-bit floating-point numbers and complex numbers, and for
    /// averages of integers.
    pub const fn new(operator: Operator, dtype: DType) -> Result<Self, NoReduction> {
        if arithmetic(dtype).is_none() {
            return Err(NoReduction::Elements(dtype));
        }
        match operator {
            Operator::Average if !dtype.is_float() => Err(NoReduction::Average(dtype)),
            _ => Ok(Self { operator, dtype }),
        }
    }

    /// Returns the operator that combines the elements.
    pub const fn operator(self) -> Operator {
        self.operator
    }

    /// Returns the type of the elements.
    pub const fn dtype(self) -> DType {
        self.dtype
    }

    /// Combines `bytes` bytes of every source, in their order, and writes the result to `target`.
    ///
    /// # Safety
    /// Every pointer is aligned to the elements and valid for `bytes` bytes. The target may be a
    /// source, and overlaps no other. Nobody else writes the sources, or accesses the target.
    pub unsafe fn run(self, target: *mut u8, sources: &[*const u8], bytes: usize) {
        let reduce = arithmetic(self.dtype).expect("`Reduction::new` refuses other types");
        // SAFETY: the caller guarantees it, and the function is that of the type of the elements.
        unsafe { reduce(self.operator, target, sources, bytes / self.dtype.bytes()) }
    }
}

/// Returns the function of each type, whose kind says whether there is one.
macro_rules! arithmetic_of {
    (
        ($dtype:ident)
        $($(#[$doc:meta])* $variant:ident = $name:literal: $kind:ident $element:ident, $($field:ident $value:literal),*;)*
    ) => {
        match $dtype {
            $(DType::$variant => arithmetic_of!($kind $element),)*
        }
    };
    (Float f16) => { Some(reduce::<Half>) };
    (Float bf16) => { Some(reduce::<BFloat>) };
    (Unsigned $element:ident) => { Some(reduce::<$element>) };
    (Signed $element:ident) => { Some(reduce::<$element>) };
    (Float $element:ident) => { Some(reduce::<$element>) };
    (Float8 $element:ident) => { None };
    (Complex $element:ident) => { None };
}

/// A function that combines elements of one type, whose number is the last argument.
type Arithmetic = unsafe fn(Operator, *mut u8, &[*const u8], usize);

/// Returns the function that combines elements of a type, or `None` if they cannot be combined.
const fn arithmetic(dtype: DType) -> Option<Arithmetic> {
    crate::element_types!([arithmetic_of](dtype))
}

/// Combines `count` elements of every source, with AVX2 if the processor has it.
///
/// # Safety
/// As [`Reduction::run`].
unsafe fn reduce<T: Number>(
    operator: Operator,
    target: *mut u8,
    sources: &[*const u8],
    count: usize,
) {
    let target: *mut T = target.cast();

    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has the feature; the rest as for this function.
        return unsafe { reduce_avx2(operator, target, sources, count) };
    }
    // SAFETY: as for this function.
    unsafe { reduce_blocks(operator, target, sources, count) }
}

/// Combines elements as [`reduce_blocks`], which the compiler vectorises here for AVX2.
///
/// # Safety
/// As [`Reduction::run`]; the processor has AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn reduce_avx2<T: Number>(
    operator: Operator,
    target: *mut T,
    sources: &[*const u8],
    count: usize,
) {
    // SAFETY: as for this function.
    unsafe { reduce_blocks(operator, target, sources, count) }
}

/// Combines `count` elements of every source, one [`BLOCK`] after the other.
///
/// It is always inlined, so that it is compiled for the instructions of its caller.
///
/// # Safety
/// As [`Reduction::run`].
#[inline(always)]
unsafe fn reduce_blocks<T: Number>(
    operator: Operator,
    target: *mut T,
    sources: &[*const u8],
    count: usize,
) {
    let Some((first, others)) = sources.split_first() else { return };
    let mut sums = [T::Sum::default(); BLOCK];
    let scale = T::inverse(sources.len());

    for begin in (0..count).step_by(BLOCK) {
        let length = BLOCK.min(count - begin);
        let sums = &mut sums[..length];

        // Elements are read and written by address. A slice would have to be free of writes by
        // peers, and the memory of a window is not: messages of channels may come at any time.
        let element_of = |source: *const u8, index: usize| {
            let element = source.cast::<T>().wrapping_add(begin + index);
            // SAFETY: the element is inside of the source and aligned.
            unsafe { element.read() }.widen()
        };

        for (index, sum) in sums.iter_mut().enumerate() {
            *sum = element_of(*first, index);
        }
        for other in others {
            let values = sums.iter_mut().enumerate();
            match operator {
                Operator::Sum | Operator::Average => {
                    values.for_each(|(index, sum)| *sum = T::add(*sum, element_of(*other, index)))
                }
                Operator::Max => {
                    values.for_each(|(index, sum)| *sum = T::max(*sum, element_of(*other, index)))
                }
                Operator::Min => {
                    values.for_each(|(index, sum)| *sum = T::min(*sum, element_of(*other, index)))
                }
                Operator::Maximum => values
                    .for_each(|(index, sum)| *sum = T::maximum(*sum, element_of(*other, index))),
                Operator::Minimum => values
                    .for_each(|(index, sum)| *sum = T::minimum(*sum, element_of(*other, index))),
            }
        }

        if operator == Operator::Average {
            sums.iter_mut().for_each(|sum| *sum = T::multiply(*sum, scale));
        }

        for (index, sum) in sums.iter().enumerate() {
            let element = target.wrapping_add(begin + index);
            // SAFETY: the element is inside of the target and aligned. The sources of this block
            // were read before.
            unsafe { element.write(T::narrow(*sum)) };
        }
    }
}

/// A number as it is in memory, and as it is accumulated.
trait Number: Copy {
    type Sum: Copy + Default;

    fn widen(self) -> Self::Sum;
    fn narrow(sum: Self::Sum) -> Self;
    fn add(sum: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn max(sum: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn min(sum: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn maximum(sum: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn minimum(sum: Self::Sum, value: Self::Sum) -> Self::Sum;
    fn inverse(count: usize) -> Self::Sum;
    fn multiply(sum: Self::Sum, factor: Self::Sum) -> Self::Sum;
}

macro_rules! number {
    ($($type:ty, $sum:ty, $widen:expr, $narrow:expr, $add:expr, $inverse:expr, $multiply:expr;)*) => {$(
        impl Number for $type {
            type Sum = $sum;

            #[inline(always)]
            fn widen(self) -> $sum {
                ($widen)(self)
            }

            #[inline(always)]
            fn narrow(sum: $sum) -> Self {
                ($narrow)(sum)
            }

            #[inline(always)]
            fn add(sum: $sum, value: $sum) -> $sum {
                ($add)(sum, value)
            }

            #[inline(always)]
            fn max(sum: $sum, value: $sum) -> $sum {
                sum.max(value)
            }

            #[inline(always)]
            fn min(sum: $sum, value: $sum) -> $sum {
                sum.min(value)
            }

            // A comparison with a NaN is false, so a NaN in `value` is taken; one in `sum` is not
            // equal to itself, and stays.
            #[inline(always)]
            #[allow(clippy::eq_op, reason = "integers have no `is_nan`")]
            fn maximum(sum: $sum, value: $sum) -> $sum {
                if sum > value || sum != sum { sum } else { value }
            }

            #[inline(always)]
            #[allow(clippy::eq_op, reason = "integers have no `is_nan`")]
            fn minimum(sum: $sum, value: $sum) -> $sum {
                if sum < value || sum != sum { sum } else { value }
            }

            #[inline(always)]
            fn inverse(count: usize) -> $sum {
                ($inverse)(count)
            }

            #[inline(always)]
            fn multiply(sum: $sum, factor: $sum) -> $sum {
                ($multiply)(sum, factor)
            }
        }
    )*};
}

macro_rules! integers {
    ($($type:ident)*) => {
        // `Reduction::new` refuses averages of integers.
        number! {$(
            $type, $type, |value| value, |sum| sum, $type::wrapping_add, |_| 1, |sum, _| sum;
        )*}
    };
}

integers! { u8 u16 u32 u64 i8 i16 i32 i64 }

number! {
    f32, f32, |value| value, |sum| sum, |sum, value| sum + value, |count| 1.0 / count as f32, |sum, by| sum * by;
    f64, f64, |value| value, |sum| sum, |sum, value| sum + value, |count| 1.0 / count as f64, |sum, by| sum * by;
    Half, f32, Half::to_f32, Half::of_f32, |sum, value| sum + value, |count| 1.0 / count as f32, |sum, by| sum * by;
    BFloat, f32, BFloat::to_f32, BFloat::of_f32, |sum, value| sum + value, |count| 1.0 / count as f32, |sum, by| sum * by;
}

/// An `f16` in memory. Its conversions have no branches, so that the compiler vectorises them.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Half(u16);

impl Half {
    /// Shifts exponent and mantissa to their place, and corrects the exponent by a multiplication,
    /// which is exact and also normalises small numbers.
    #[inline(always)]
    fn to_f32(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let shifted = u32::from(self.0 & 0x7fff) << 13;
        let magnitude = f32::from_bits(shifted) * f32::from_bits((254 - 15) << 23);

        // Infinity and NaN keep the largest exponent.
        let special = if shifted >= 0x7c00 << 13 { 0xff << 23 } else { 0 };
        f32::from_bits(magnitude.to_bits() | special | sign)
    }

    /// Rounds to the nearest number, and to the even one of two.
    #[inline(always)]
    fn of_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;

        // The addition aligns the bits of a small number, and rounds them as the processor rounds
        // sums.
        let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());

        let odd = (magnitude >> 13) & 1;
        let normal =
            magnitude.wrapping_add(((15_u32.wrapping_sub(127)) << 23).wrapping_add(0xfff)) + odd;
        let finite = if magnitude < 113 << 23 { small } else { normal >> 13 };

        // A NaN keeps the upper bits of its payload.
        let special =
            if magnitude > 0xff << 23 { 0x7e00 | (magnitude >> 13 & 0x3ff) } else { 0x7c00 };
        let result = if magnitude >= 143 << 23 { special } else { finite };
        Self((result | sign) as u16)
    }
}

/// A `bf16` in memory, the upper half of an `f32`.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct BFloat(u16);

impl BFloat {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    /// Rounds to the nearest number, and to the even one of two.
    #[inline(always)]
    fn of_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
        // Rounding must not turn a NaN into a number.
        let result = if value.is_nan() { bits | 0x40_0000 } else { rounded };
        Self((result >> 16) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_and_bf16_are_converted_as_by_the_crate_half() {
        for bits in 0..=u16::MAX {
            let (own, half) = (Half(bits).to_f32(), half::f16::from_bits(bits).to_f32());
            assert!(own.to_bits() == half.to_bits() || own.is_nan() && half.is_nan(), "{bits:x}");
            let (own, half) = (BFloat(bits).to_f32(), half::bf16::from_bits(bits).to_f32());
            assert!(own.to_bits() == half.to_bits() || own.is_nan() && half.is_nan(), "{bits:x}");
        }
        let random = &mut fastrand::Rng::with_seed(36);
        let near = (0..=u16::MAX).map(|bits| {
            let exact = half::f16::from_bits(bits).to_f32().to_bits();
            exact.wrapping_add(random.u32(0..0x4000)).wrapping_sub(0x2000)
        });
        let mut values: Vec<u32> = near.collect();
        values.extend((0..1_000_000).map(|_| random.u32(..)));
        values.extend([0x1000, 0x1001, 0x0fff].map(|low| 0x3f80_0000 | low));
        for bits in values {
            let value = f32::from_bits(bits);
            let (own, half) = (Half::of_f32(value).0, half::f16::from_f32(value));
            assert!(
                own == half.to_bits() || Half(own).to_f32().is_nan() && half.is_nan(),
                "{value:e}: {own:x}, {half:?}"
            );
            let (own, half) = (BFloat::of_f32(value).0, half::bf16::from_f32(value));
            assert!(
                own == half.to_bits() || BFloat(own).to_f32().is_nan() && half.is_nan(),
                "{value:e}"
            );
        }
    }

    #[test]
    fn an_average_is_infinite_where_its_sum_is() {
        let (large, mut target) = (3e38_f32, 0_f32);
        let source = std::ptr::from_ref(&large).cast();
        let average = Reduction::new(Operator::Average, DType::F32).unwrap();
        // SAFETY: source and target are one element each.
        unsafe { average.run(std::ptr::from_mut(&mut target).cast(), &[source; 2], 4) };
        assert_eq!(target, f32::INFINITY);

        // Sums of `f16` are made in `f32`.
        let (large, mut target) = (half::f16::MAX, half::f16::ZERO);
        let source = std::ptr::from_ref(&large).cast();
        let average = Reduction::new(Operator::Average, DType::F16).unwrap();
        // SAFETY: source and target are one element each.
        unsafe { average.run(std::ptr::from_mut(&mut target).cast(), &[source; 2], 2) };
        assert_eq!(target, half::f16::MAX);
    }

    /// Reduces random elements, and compares them with `expected` of the elements at one place.
    fn check<T: Copy + PartialEq + fmt::Debug>(
        dtype: DType,
        random: impl Fn(&mut fastrand::Rng) -> T,
        expected: impl Fn(Operator, &[T]) -> Option<T>,
    ) {
        let rng = &mut fastrand::Rng::with_seed(dtype as u64);
        for ranks in 1..=64 {
            for count in [rng.usize(..9), BLOCK - 1, BLOCK, BLOCK + 1, 3 * rng.usize(..BLOCK)] {
                let sources: Vec<Vec<T>> =
                    (0..ranks).map(|_| (0..count).map(|_| random(rng)).collect()).collect();
                for operator in Operator::ALL {
                    let Ok(reduction) = Reduction::new(operator, dtype) else { continue };
                    let mut target: Vec<T> = (0..count).map(|_| random(rng)).collect();
                    let pointers: Vec<*const u8> =
                        sources.iter().map(|source| source.as_ptr().cast()).collect();
                    let bytes = count * size_of::<T>();
                    // SAFETY: the vectors have this many bytes, are aligned and do not overlap.
                    unsafe {
                        reduction.run(target.as_mut_ptr().cast(), &pointers, bytes);
                    }
                    for (at, found) in target.iter().enumerate() {
                        let values: Vec<T> = sources.iter().map(|source| source[at]).collect();
                        let expected = expected(operator, &values);
                        assert_eq!(Some(*found), expected, "{operator} of {values:?}");
                    }
                }
            }
        }
    }

    macro_rules! check_integers {
        ($($type:ident $dtype:ident)*) => {$(
            check::<$type>(DType::$dtype, |rng| rng.$type(..), |operator, values| match operator {
                Operator::Max | Operator::Maximum => values.iter().copied().max(),
                Operator::Min | Operator::Minimum => values.iter().copied().min(),
                Operator::Sum | Operator::Average => {
                    values.iter().copied().reduce($type::wrapping_add)
                }
            });
        )*};
    }

    #[test]
    fn every_type_and_operator_gives_the_bits_of_a_plain_loop() {
        check_integers! { u8 U8 u16 U16 u32 U32 u64 U64 i8 I8 i16 I16 i32 I32 i64 I64 }
        let float = |operator: Operator, values: &[f64], by: fn(f64) -> f64| match operator {
            Operator::Max | Operator::Maximum => values.iter().copied().reduce(f64::max),
            Operator::Min | Operator::Minimum => values.iter().copied().reduce(f64::min),
            Operator::Sum => values.iter().copied().reduce(|sum, value| by(sum + value)),
            Operator::Average => {
                let sum = values.iter().copied().reduce(|sum, value| by(sum + value));
                sum.map(|sum| by(sum * by(1.0 / values.len() as f64)))
            }
        };
        let random = |rng: &mut fastrand::Rng| (rng.f64() - 0.5) * f64::from(1 << rng.u32(..12));
        check::<f64>(DType::F64, random, |operator, values| float(operator, values, |sum| sum));
        let single = |sum: f64| f64::from(sum as f32);
        let wide =
            |values: &[f32]| values.iter().map(|value| f64::from(*value)).collect::<Vec<_>>();
        check::<f32>(
            DType::F32,
            |rng| random(rng) as f32,
            |operator, values| float(operator, &wide(values), single).map(|sum| sum as f32),
        );
        let check_short =
            |dtype, to_f64: fn(u16) -> f64, of_f64: fn(f64) -> u16, of_f32: fn(f32) -> u16| {
                check::<u16>(
                    dtype,
                    |rng| of_f64(random(rng)),
                    |operator, values| {
                        let values: Vec<f64> = values.iter().map(|bits| to_f64(*bits)).collect();
                        float(operator, &values, single).map(|sum| of_f32(sum as f32))
                    },
                );
            };
        check_short(
            DType::F16,
            |bits| half::f16::from_bits(bits).to_f64(),
            |value| half::f16::from_f64(value).to_bits(),
            |value| half::f16::from_f32(value).to_bits(),
        );
        check_short(
            DType::Bf16,
            |bits| half::bf16::from_bits(bits).to_f64(),
            |value| half::bf16::from_f64(value).to_bits(),
            |value| half::bf16::from_f32(value).to_bits(),
        );
    }

    /// A NaN of any source, also of the first and of the last one, decides or is passed over.
    #[test]
    fn only_maximum_and_minimum_pass_a_nan_on() {
        fn check<T: Copy>(dtype: DType, of: fn(f32) -> T, to: fn(T) -> f32) {
            let numbers = [-3.0, 7.0, f32::NEG_INFINITY];
            for at in 0..=numbers.len() {
                let mut values = numbers.to_vec();
                values.insert(at, f32::NAN);
                let values: Vec<T> = values.into_iter().map(of).collect();
                for operator in Operator::ALL {
                    let sources: Vec<*const u8> =
                        values.iter().map(|value| (&raw const *value).cast()).collect();
                    let mut target = values[0];
                    let reduction = Reduction::new(operator, dtype).unwrap();
                    // SAFETY: each source and the target is an element of this type.
                    unsafe {
                        reduction.run((&raw mut target).cast(), &sources, size_of::<T>());
                    }

                    let expected = match operator {
                        Operator::Max => 7.0,
                        Operator::Min => f32::NEG_INFINITY,
                        _ => f32::NAN,
                    };
                    let found = to(target);
                    let is_same = found == expected || found.is_nan() && expected.is_nan();
                    assert!(is_same, "{operator} {dtype} at {at}: {found}");
                }
            }
        }

        check::<f32>(DType::F32, |value| value, |value| value);
        check::<f64>(DType::F64, f64::from, |value| value as f32);
        check::<half::f16>(DType::F16, half::f16::from_f32, half::f16::to_f32);
        check::<half::bf16>(DType::Bf16, half::bf16::from_f32, half::bf16::to_f32);
    }

    /// Also gives the interpreter Miri little to do.
    #[test]
    fn the_target_can_be_a_source() {
        let reduction = Reduction::new(Operator::Max, DType::U16).unwrap();
        for target in 0..3 {
            let mut sources = [1_u16, 5, 3].map(|value| vec![value; BLOCK + 1]);
            let pointers = sources.each_mut().map(Vec::as_mut_ptr);
            let inputs = pointers.map(|source| source.cast_const().cast());
            let bytes = (BLOCK + 1) * size_of::<u16>();
            // SAFETY: the vectors have this many bytes and are aligned; the target is one of them,
            // and overlaps no other.
            unsafe { reduction.run(pointers[target].cast(), &inputs, bytes) };
            assert_eq!(sources[target], [5; BLOCK + 1]);
        }
    }

    #[test]
    fn types_and_operators_without_a_meaning_are_named() {
        let text =
            |operator: Operator, dtype| Reduction::new(operator, dtype).unwrap_err().to_string();
        assert_eq!(
            text(Operator::Average, DType::I32),
            "operator is average for dtype i32, expected sum, max or min for integers"
        );
        for dtype in [DType::F8E4M3, DType::F8E5M2, DType::F8E8M0, DType::Complex64] {
            assert_eq!(
                text(Operator::Sum, dtype),
                format!(
                    "dtype is {dtype}, expected an integer, f16, bf16, f32 or f64 in a reduction"
                )
            );
        }
        assert_eq!(
            "product".parse::<Operator>().unwrap_err().to_string(),
            r#"operator is "product", expected one of sum, max, min, average, maximum, minimum"#
        );
    }
}
