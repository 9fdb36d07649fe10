//! Defines the types of elements, by one table that all crates of the workspace read.

use std::ffi::CStr;
use std::fmt;
use std::str::FromStr;

/// Calls the macro at the path `$callback` with the table of element types, behind `$arguments`.
///
/// A row has the name of the type in Rust; sizes and alignments in bytes; the number in the C
/// interface, which never changes; the code in DLPack; the format in Python's buffer protocol, that
/// of unsigned integers if the protocol lacks the type; and the name in PyTorch, NumPy and
/// `ml_dtypes`.
#[doc(hidden)]
#[macro_export]
macro_rules! element_types {
    ([$($callback:tt)*] ($($arguments:tt)*)) => {
        $($callback)*! {
            ($($arguments)*)

            /// An unsigned integer of 8 bits, also used for plain bytes.
            U8 = "u8": Unsigned u8, bytes 1, alignment 1, c 0, dlpack 1, buffer c"B", python "uint8";
            /// An unsigned integer of 16 bits.
            U16 = "u16": Unsigned u16, bytes 2, alignment 2, c 1, dlpack 1, buffer c"H", python "uint16";
            /// An unsigned integer of 32 bits.
            U32 = "u32": Unsigned u32, bytes 4, alignment 4, c 2, dlpack 1, buffer c"I", python "uint32";
            /// An unsigned integer of 64 bits.
            U64 = "u64": Unsigned u64, bytes 8, alignment 8, c 3, dlpack 1, buffer c"Q", python "uint64";
            /// A signed integer of 8 bits.
            I8 = "i8": Signed i8, bytes 1, alignment 1, c 4, dlpack 0, buffer c"b", python "int8";
            /// A signed integer of 16 bits.
            I16 = "i16": Signed i16, bytes 2, alignment 2, c 5, dlpack 0, buffer c"h", python "int16";
            /// A signed integer of 32 bits.
            I32 = "i32": Signed i32, bytes 4, alignment 4, c 6, dlpack 0, buffer c"i", python "int32";
            /// A signed integer of 64 bits.
            I64 = "i64": Signed i64, bytes 8, alignment 8, c 7, dlpack 0, buffer c"q", python "int64";
            /// An 8-bit floating-point number with 4 bits of exponent and 3 of mantissa
            /// (`float8_e4m3fn` in PyTorch).
            F8E4M3 = "f8e4m3": Float8 F8E4M3, bytes 1, alignment 1, c 8, dlpack 10, buffer c"B", python "float8_e4m3fn";
            /// An 8-bit floating-point number with 5 bits of exponent and 2 of mantissa
            /// (`float8_e5m2` in PyTorch).
            F8E5M2 = "f8e5m2": Float8 F8E5M2, bytes 1, alignment 1, c 9, dlpack 12, buffer c"B", python "float8_e5m2";
            /// A power of two, whose exponent has 8 bits (`float8_e8m0fnu` in PyTorch).
            F8E8M0 = "f8e8m0": Float8 F8E8M0, bytes 1, alignment 1, c 14, dlpack 14, buffer c"B", python "float8_e8m0fnu";
            /// A floating-point number of IEEE 754 half precision.
            F16 = "f16": Float f16, bytes 2, alignment 2, c 10, dlpack 2, buffer c"e", python "float16";
            /// A bfloat16 floating-point number, which is the upper half of an `f32`.
            Bf16 = "bf16": Float bf16, bytes 2, alignment 2, c 11, dlpack 4, buffer c"H", python "bfloat16";
            /// A floating-point number of IEEE 754 single precision.
            F32 = "f32": Float f32, bytes 4, alignment 4, c 12, dlpack 2, buffer c"f", python "float32";
            /// A floating-point number of IEEE 754 double precision.
            F64 = "f64": Float f64, bytes 8, alignment 8, c 13, dlpack 2, buffer c"d", python "float64";
            /// A complex number of two `f32`, the real part first.
            Complex64 = "complex64": Complex Complex64, bytes 8, alignment 4, c 15, dlpack 5, buffer c"Zf", python "complex64";
        }
    };
}

/// Tells apart element types by their arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(peerlane_workspace), non_exhaustive)]
pub enum ElementKind {
    /// Unsigned integers.
    Unsigned,
    /// Signed integers in two's complement.
    Signed,
    /// Floating-point numbers of at least 16 bits.
    Float,
    /// Floating-point numbers of 8 bits, which only move.
    Float8,
    /// Complex numbers, which only move.
    Complex,
}

macro_rules! define {
    (
        ()
        $(
            $(#[$doc:meta])*
            $variant:ident = $name:literal: $kind:ident $element:ident, bytes $bytes:literal,
            alignment $alignment:literal, c $c_number:literal, dlpack $dlpack:literal,
            buffer $format:literal, python $python:literal;
        )*
    ) => {
        /// The type of the elements of a tensor, as a value at run time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[cfg_attr(not(peerlane_workspace), non_exhaustive)]
        pub enum DType {
            $($(#[$doc])* $variant,)*
        }

        impl DType {
            /// All element types, in the order of their declaration.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Returns the name of the element type, which [`FromStr`] reads.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// Returns the kind of the elements, which decides whether they can be reduced.
            pub const fn kind(self) -> ElementKind {
                match self {
                    $(Self::$variant => ElementKind::$kind,)*
                }
            }

            /// Returns the size of one element in bytes.
            pub const fn bytes(self) -> usize {
                match self {
                    $(Self::$variant => $bytes,)*
                }
            }

            /// Returns the alignment of an element in bytes, which divides its size.
            pub const fn alignment(self) -> usize {
                match self {
                    $(Self::$variant => $alignment,)*
                }
            }

            /// Returns the number of the element type in the C interface, which never changes.
            pub const fn c_number(self) -> u32 {
                match self {
                    $(Self::$variant => $c_number,)*
                }
            }

            /// Returns the code of the element type in DLPack, `DLDataTypeCode`. Its bits are
            /// those of [`bytes`](Self::bytes).
            pub const fn dlpack_code(self) -> u8 {
                match self {
                    $(Self::$variant => $dlpack,)*
                }
            }

            /// Returns the format of the element type in Python's buffer protocol, or that of
            /// unsigned integers of its size if the protocol lacks the type.
            pub const fn buffer_format(self) -> &'static CStr {
                match self {
                    $(Self::$variant => $format,)*
                }
            }

            /// Returns the name of the element type in PyTorch, NumPy or `ml_dtypes`.
            pub const fn python_name(self) -> &'static str {
                match self {
                    $(Self::$variant => $python,)*
                }
            }
        }
    };
}

element_types!([define]());

impl DType {
    /// Returns whether the elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self.kind(), ElementKind::Float | ElementKind::Float8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DType {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let found = Self::ALL.into_iter().find(|dtype| dtype.name() == text);
        found.ok_or_else(|| UnknownName::new("dtype", text, &Self::ALL.map(Self::name)))
    }
}

/// An error that says which names are known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {found:?}, expected one of {known}")]
pub struct UnknownName {
    what: &'static str,
    found: String,
    known: String,
}

impl UnknownName {
    pub(crate) fn new(what: &'static str, found: &str, known: &[&str]) -> Self {
        Self { what, found: found.to_owned(), known: known.join(", ") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_c_are_those_of_the_first_release_and_new_ones_follow() {
        let first = [
            "u8", "u16", "u32", "u64", "i8", "i16", "i32", "i64", "f8e4m3", "f8e5m2", "f16",
            "bf16", "f32", "f64",
        ];
        for (number, name) in (0..).zip(first) {
            assert_eq!(name.parse::<DType>().unwrap().c_number(), number);
        }

        let mut numbers: Vec<usize> =
            DType::ALL.iter().map(|dtype| dtype.c_number() as usize).collect();
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..DType::ALL.len()));
    }

    #[test]
    fn names_and_types_of_dlpack_are_those_of_one_type() {
        for (index, one) in DType::ALL.iter().enumerate() {
            for other in &DType::ALL[..index] {
                assert_ne!(one.name(), other.name());
                assert_ne!(one.python_name(), other.python_name());
                let [one, other] = [one, other].map(|dtype| (dtype.dlpack_code(), dtype.bytes()));
                assert_ne!(one, other);
            }
        }
    }
}
