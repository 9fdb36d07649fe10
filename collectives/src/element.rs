//! Casts bytes to elements, and names the types of elements and the operators of reductions.

use std::fmt;

use bytemuck::PodCastError;
use peerlane_hal::ErrorKind;

use crate::error::Error;

pub use peerlane_hal::{DType, Operator};

/// The bits of an 8-bit floating-point number with 4 bits of exponent and 3 of mantissa, `float8_e4m3fn` in PyTorch.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct F8E4M3(pub u8);

/// The bits of an 8-bit floating-point number with 5 bits of exponent and 2 of mantissa, `float8_e5m2` in PyTorch.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct F8E5M2(pub u8);

// SAFETY: zero is a value of the byte.
unsafe impl bytemuck::Zeroable for F8E4M3 {}
// SAFETY: the type is a byte without padding, and every bit pattern is a value.
unsafe impl bytemuck::Pod for F8E4M3 {}
// SAFETY: as above.
unsafe impl bytemuck::Zeroable for F8E5M2 {}
// SAFETY: as above.
unsafe impl bytemuck::Pod for F8E5M2 {}

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

macro_rules! elements {
    ($($(#[$feature:meta])? $element:ty => $dtype:ident),* $(,)?) => {$(
        $(#[$feature])?
        impl sealed::Sealed for $element {}
        $(#[$feature])?
        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }
        $(#[$feature])?
        const _: () = assert!(size_of::<$element>() == DType::$dtype.bytes());
    )*};
}

elements! {
    u8 => U8,
    u16 => U16,
    u32 => U32,
    u64 => U64,
    i8 => I8,
    i16 => I16,
    i32 => I32,
    i64 => I64,
    F8E4M3 => F8E4M3,
    F8E5M2 => F8E5M2,
    #[cfg(feature = "half")] half::f16 => F16,
    #[cfg(feature = "half")] half::bf16 => Bf16,
    f32 => F32,
    f64 => F64,
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
    let (dtype, bytes) = (T::DTYPE, T::DTYPE.bytes());
    let text = match error {
        PodCastError::TargetAlignmentGreaterAndInputNotAligned => format!(
            "misaligned slice of {dtype}: it begins {} bytes after an aligned address, expected a \
             multiple of {bytes} bytes",
            address % bytes
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
            @r#"dtype is "f8", expected one of u8, u16, u32, u64, i8, i16, i32, i64, f8e4m3, f8e5m2, f16, bf16, f32, f64"#
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
