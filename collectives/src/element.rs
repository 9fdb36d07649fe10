//! Casts bytes to elements, and names the types of elements and the operators of reductions.

use std::fmt;

use bytemuck::PodCastError;
use peerlane_hal::ErrorKind;

use crate::error::Error;

#[doc(hidden)]
pub use crate::{match_element, with_element};
#[doc(hidden)]
pub use peerlane_hal::element_types;
pub use peerlane_hal::{DType, ElementKind, Operator};

macro_rules! float8 {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name(pub u8);

        // SAFETY: zero is a value of the byte.
        unsafe impl bytemuck::Zeroable for $name {}
        // SAFETY: the type is a byte without padding, and every bit pattern is a value.
        unsafe impl bytemuck::Pod for $name {}
    )*};
}

float8! {
    /// The bits of an 8-bit floating-point number with 4 bits of exponent and 3 of mantissa,
    /// `float8_e4m3fn` in PyTorch.
    F8E4M3;
    /// The bits of an 8-bit floating-point number with 5 bits of exponent and 2 of mantissa,
    /// `float8_e5m2` in PyTorch.
    F8E5M2;
    /// The exponent of a power of two, `float8_e8m0fnu` in PyTorch.
    F8E8M0;
}

/// A complex number, `complex64` in PyTorch and NumPy.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Complex64 {
    /// The real part.
    pub re: f32,
    /// The imaginary part.
    pub im: f32,
}

// SAFETY: zero is a value of both parts.
unsafe impl bytemuck::Zeroable for Complex64 {}
// SAFETY: the type is two `f32` without padding, and every bit pattern is a value.
unsafe impl bytemuck::Pod for Complex64 {}

/// The types of the table of element types, by their names there.
#[doc(hidden)]
pub mod rust_types {
    pub use super::*;
    pub use core::primitive::*;
    #[cfg(feature = "half")]
    pub use half::{bf16, f16};
}

mod sealed {
    pub trait Sealed {}
}

/// A number type that the elements of a block can have.
///
/// Every bit pattern is a value, so the bytes of a peer can be read without a check.
pub trait Element: bytemuck::Pod + Send + Sync + fmt::Debug + sealed::Sealed {
    /// The element type as a value of [`DType`].
    const DTYPE: DType;
}

/// Stands for an element type that is chosen at run time, in
/// [`UntypedOperation`](crate::group::UntypedOperation) and in the windows and buffers of its
/// builder.
#[derive(Clone, Copy, Debug)]
pub enum Untyped {}

macro_rules! elements {
    (
        ()
        $(
            $(#[$doc:meta])*
            $variant:ident = $name:literal: $kind:ident $element:ident, $($field:ident $value:literal),*;
        )*
    ) => {
        $(elements!($element $variant);)*
    };
    (f16 $variant:ident) => {
        #[cfg(feature = "half")]
        elements!(@ f16 $variant);
    };
    (bf16 $variant:ident) => {
        #[cfg(feature = "half")]
        elements!(@ bf16 $variant);
    };
    ($element:ident $variant:ident) => {
        elements!(@ $element $variant);
    };
    (@ $element:ident $variant:ident) => {
        impl sealed::Sealed for rust_types::$element {}
        impl Element for rust_types::$element {
            const DTYPE: DType = DType::$variant;
        }
        const _: () = {
            assert!(size_of::<rust_types::$element>() == DType::$variant.bytes());
            assert!(align_of::<rust_types::$element>() == DType::$variant.alignment());
        };
    };
}

element_types!([elements]());

/// Evaluates an expression, a `Result`, with the Rust type that a [`DType`] stands for.
///
/// The caller's crate has the types of the feature `half`.
#[doc(hidden)]
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $alias:ident => $work:expr) => {
        $crate::element::element_types!([$crate::match_element] ($dtype, $alias => $work))
    };
}

/// Expands to the match of [`with_element`].
#[doc(hidden)]
#[macro_export]
macro_rules! match_element {
    (
        ($dtype:expr, $alias:ident => $work:expr)
        $(
            $(#[$doc:meta])*
            $variant:ident = $name:literal: $kind:ident $element:ident, $($field:ident $value:literal),*;
        )*
    ) => {
        match $dtype {
            $($crate::element::DType::$variant => {
                type $alias = $crate::element::rust_types::$element;
                $work
            })*
            #[cfg(not(peerlane_workspace))]
            dtype => Err($crate::element::unknown_type(dtype).into()),
        }
    };
}

/// Returns the error for a type of a newer `peerlane-hal`.
#[doc(hidden)]
pub fn unknown_type(dtype: DType) -> Error {
    let text = format!("dtype is {dtype}, which this version does not know");
    Error::new(ErrorKind::InvalidArgument, text)
}

/// Returns bytes as elements of the type `T`, without copying.
///
/// # Errors
/// If the bytes are not aligned for `T`, or are not a whole number of elements.
pub fn cast<T: Element>(bytes: &[u8]) -> Result<&[T], Error> {
    let (address, length) = (bytes.as_ptr().addr(), bytes.len());
    bytemuck::try_cast_slice(bytes).map_err(|error| refused::<T>(address, length, error))
}

/// Returns bytes as writable elements of the type `T`, without copying.
///
/// # Errors
/// As [`cast`].
pub fn cast_mut<T: Element>(bytes: &mut [u8]) -> Result<&mut [T], Error> {
    let (address, length) = (bytes.as_ptr().addr(), bytes.len());
    bytemuck::try_cast_slice_mut(bytes).map_err(|error| refused::<T>(address, length, error))
}

fn refused<T: Element>(address: usize, length: usize, error: PodCastError) -> Error {
    let (dtype, bytes, alignment) = (T::DTYPE, T::DTYPE.bytes(), T::DTYPE.alignment());
    let text = match error {
        PodCastError::TargetAlignmentGreaterAndInputNotAligned => format!(
            "misaligned slice of {dtype}: it begins {} bytes after an aligned address, expected a \
             multiple of {alignment} bytes",
            address % alignment
        ),
        _ => format!(
            "the slice has {length} bytes, expected a multiple of the element size, {bytes} bytes \
             ({dtype})"
        ),
    };
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse::<DType>().unwrap(), dtype);
        }
        insta::assert_snapshot!(
            "f8".parse::<DType>().unwrap_err(),
            @r#"dtype is "f8", expected one of u8, u16, u32, u64, i8, i16, i32, i64, f8e4m3, f8e5m2, f8e8m0, f16, bf16, f32, f64, complex64"#
        );
    }

    #[test]
    fn aligned_bytes_are_cast_without_a_copy() {
        let mut words = [1.0_f64, 2.0];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
        assert_eq!(cast::<f64>(bytes).unwrap(), [1.0, 2.0]);
        cast_mut::<f64>(bytes).unwrap()[1] = 3.0;
        assert_eq!(words[1], 3.0);
    }

    #[test]
    fn complex_numbers_are_aligned_as_their_parts() {
        let parts = [1.0_f32, 2.0, 3.0, 4.0, 5.0];
        let bytes: &[u8] = bytemuck::cast_slice(&parts[1..]);
        let expected = [Complex64 { re: 2.0, im: 3.0 }, Complex64 { re: 4.0, im: 5.0 }];
        assert_eq!(cast::<Complex64>(bytes).unwrap(), expected);
        insta::assert_snapshot!(
            cast::<Complex64>(&bytes[2..10]).unwrap_err(),
            @"misaligned slice of complex64: it begins 2 bytes after an aligned address, expected a multiple of 4 bytes"
        );
    }

    #[test]
    fn misaligned_slices_and_odd_lengths_are_refused() {
        let words = [0_u64; 2];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        insta::assert_snapshot!(
            cast::<f32>(&bytes[1..5]).unwrap_err(),
            @"misaligned slice of f32: it begins 1 bytes after an aligned address, expected a multiple of 4 bytes"
        );
        insta::assert_snapshot!(
            cast::<i64>(&bytes[..12]).unwrap_err(),
            @"the slice has 12 bytes, expected a multiple of the element size, 8 bytes (i64)"
        );
    }

    #[cfg(feature = "half")]
    #[test]
    fn halves_are_elements() {
        let bytes = half::bf16::from_f32(1.5).to_ne_bytes();
        let words = [u16::from_ne_bytes(bytes)];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        assert_eq!(cast::<half::bf16>(bytes).unwrap()[0].to_f32(), 1.5);
        assert_eq!(half::f16::DTYPE, DType::F16);
    }
}
