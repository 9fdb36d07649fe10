//! Defines the types of elements.

use std::fmt;
use std::str::FromStr;

/// The type of the elements of a tensor, as a value at run time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(not(peerlane_workspace), non_exhaustive)]
pub enum DType {
    /// An unsigned integer of 8 bits, also used for plain bytes.
    U8,
    /// An unsigned integer of 16 bits.
    U16,
    /// An unsigned integer of 32 bits.
    U32,
    /// An unsigned integer of 64 bits.
    U64,
    /// A signed integer of 8 bits.
    I8,
    /// A signed integer of 16 bits.
    I16,
    /// A signed integer of 32 bits.
    I32,
    /// A signed integer of 64 bits.
    I64,
    /// An 8-bit floating-point number with 4 bits of exponent and 3 of mantissa (`float8_e4m3fn` in PyTorch).
    F8E4M3,
    /// An 8-bit floating-point number with 5 bits of exponent and 2 of mantissa (`float8_e5m2` in PyTorch).
    F8E5M2,
    /// A floating-point number of IEEE 754 half precision.
    F16,
    /// A bfloat16 floating-point number, which is the upper half of an `f32`.
    Bf16,
    /// A floating-point number of IEEE 754 single precision.
    F32,
    /// A floating-point number of IEEE 754 double precision.
    F64,
}

impl DType {
    /// All element types, in the order of their declaration.
    pub const ALL: [Self; 14] = [
        Self::U8,
        Self::U16,
        Self::U32,
        Self::U64,
        Self::I8,
        Self::I16,
        Self::I32,
        Self::I64,
        Self::F8E4M3,
        Self::F8E5M2,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
    ];

    /// Returns the name of the element type, which [`FromStr`] reads.
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::U16 => "u16",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::I8 => "i8",
            Self::I16 => "i16",
            Self::I32 => "i32",
            Self::I64 => "i64",
            Self::F8E4M3 => "f8e4m3",
            Self::F8E5M2 => "f8e5m2",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    /// Returns whether the elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2 | Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }

    /// Returns the size of one element in bytes, which is also its alignment.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 | Self::F8E4M3 | Self::F8E5M2 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
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
