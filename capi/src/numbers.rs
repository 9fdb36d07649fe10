//! Defines the numbers of collectives, element types, reductions and settings in the header.

use peerlane::collective::Collective;
use peerlane::{DType, Operator};

use crate::status::Failure;

/// A collective. The numbers are those of `peerlane_operation_options`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum CollectiveNumber {
    /// Every rank gets the block of every rank.
    AllGather = 0,
    /// Every rank gets the block of the root.
    Broadcast = 1,
    /// Every rank gets a different block from every rank.
    AllToAll = 2,
    /// The root gets the block of every rank.
    Gather = 3,
    /// Every rank gets a different block from the root.
    Scatter = 4,
    /// Every rank gets one block of the reduction of all inputs.
    ReduceScatter = 5,
    /// Every rank gets the reduction of all inputs.
    AllReduce = 6,
    /// The root gets the reduction of all inputs.
    Reduce = 7,
    /// Every rank gets the reduction of the inputs of the ranks up to its own.
    Scan = 8,
    /// Every rank except rank 0 gets the reduction of the inputs of the ranks below its own.
    Exscan = 9,
}

/// The type of elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum DTypeNumber {
    /// `uint8_t`
    U8 = 0,
    /// `uint16_t`
    U16 = 1,
    /// `uint32_t`
    U32 = 2,
    /// `uint64_t`
    U64 = 3,
    /// `int8_t`
    I8 = 4,
    /// `int16_t`
    I16 = 5,
    /// `int32_t`
    I32 = 6,
    /// `int64_t`
    I64 = 7,
    /// 8 bits, 4 of exponent and 3 of mantissa; it cannot be reduced.
    F8E4M3 = 8,
    /// 8 bits, 5 of exponent and 2 of mantissa; it cannot be reduced.
    F8E5M2 = 9,
    /// IEEE half precision.
    F16 = 10,
    /// The upper half of a `float`.
    BF16 = 11,
    /// `float`
    F32 = 12,
    /// `double`
    F64 = 13,
    /// A power of two by the 8 bits of its exponent; it cannot be reduced.
    F8E8M0 = 14,
    /// Two `float`, the real part first; it cannot be reduced.
    Complex64 = 15,
}

/// How a reduction joins elements.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum ReductionNumber {
    /// The sum, which wraps around for integers. It is NaN if any element is.
    Sum = 0,
    /// The largest element. A number is preferred to a NaN, as by `fmax`: the result is NaN only if
    /// all elements are.
    Max = 1,
    /// The smallest element. A number is preferred to a NaN, as by `fmin`: the result is NaN only
    /// if all elements are.
    Min = 2,
    /// The sum divided by the number of ranks, for floating-point types. It is NaN if any element
    /// is.
    Average = 3,
    /// The largest element, or NaN if any element is NaN, as by `torch.maximum`.
    Maximum = 4,
    /// The smallest element, or NaN if any element is NaN, as by `torch.minimum`.
    Minimum = 5,
}

/// Says whether an option of an operation is on, off or as in its group.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub enum SettingNumber {
    /// The operation takes the setting of the group.
    AsGroup = 0,
    /// The option is off.
    Off = 1,
    /// The option is on.
    On = 2,
}

impl CollectiveNumber {
    /// Returns the number of `collective`, whatever its root.
    pub(crate) fn from_collective(collective: Collective) -> Self {
        match collective {
            Collective::AllGather => Self::AllGather,
            Collective::Broadcast { .. } => Self::Broadcast,
            Collective::AllToAll => Self::AllToAll,
            Collective::Gather { .. } => Self::Gather,
            Collective::Scatter { .. } => Self::Scatter,
            Collective::ReduceScatter => Self::ReduceScatter,
            Collective::AllReduce => Self::AllReduce,
            Collective::Reduce { .. } => Self::Reduce,
            Collective::Scan => Self::Scan,
            Collective::Exscan => Self::Exscan,
            #[cfg(not(peerlane_workspace))]
            _ => unreachable!("this library is built with the collectives of its own version"),
        }
    }
}

impl ReductionNumber {
    /// Returns the number of `operator`.
    pub(crate) fn from_operator(operator: Operator) -> Self {
        match operator {
            Operator::Sum => Self::Sum,
            Operator::Max => Self::Max,
            Operator::Min => Self::Min,
            Operator::Average => Self::Average,
            Operator::Maximum => Self::Maximum,
            Operator::Minimum => Self::Minimum,
            #[cfg(not(peerlane_workspace))]
            _ => unreachable!("this library is built with the operators of its own version"),
        }
    }
}

impl SettingNumber {
    /// All settings.
    pub(crate) const ALL: [Self; 3] = [Self::AsGroup, Self::Off, Self::On];

    /// Returns whether the option is on, or `None` for the setting of the group.
    pub(crate) fn value(self) -> Option<bool> {
        match self {
            Self::AsGroup => None,
            Self::Off => Some(false),
            Self::On => Some(true),
        }
    }
}

/// Returns the collective with a number of the header; its root is 0.
pub(crate) fn collective(number: u32) -> Result<Collective, Failure> {
    let number_of = |collective| CollectiveNumber::from_collective(collective) as u32;
    numbered("collective", number, Collective::ALL, number_of)
}

/// Returns the operator with a number of the header.
pub(crate) fn operator(number: u32) -> Result<Operator, Failure> {
    let number_of = |operator| ReductionNumber::from_operator(operator) as u32;
    numbered("reduction", number, &Operator::ALL, number_of)
}

/// Returns the element type that has a number in the header.
pub(crate) fn dtype(number: u32) -> Result<DType, Failure> {
    numbered("dtype", number, &DType::ALL, DType::c_number)
}

/// Returns whether the option `field` is on, or `None` for the setting of the group.
pub(crate) fn setting(field: &str, number: u32) -> Result<Option<bool>, Failure> {
    let setting = numbered(field, number, &SettingNumber::ALL, |setting| setting as u32);
    setting.map(SettingNumber::value)
}

/// Returns the value that has `number` in the header, where `number_of` returns the number of each
/// of `values`.
fn numbered<T: Copy>(
    field: &str,
    number: u32,
    values: &[T],
    number_of: impl Fn(T) -> u32,
) -> Result<T, Failure> {
    // Almost all lists are in the order of their numbers, and each immediate call looks here.
    let likely = usize::try_from(number).ok().and_then(|index| values.get(index));
    if let Some(value) = likely.filter(|value| number_of(**value) == number) {
        return Ok(*value);
    }

    let found = values.iter().copied().find(|value| number_of(*value) == number);
    found.ok_or_else(|| {
        let last = values.iter().map(|value| number_of(*value)).max().unwrap_or(0);
        Failure::argument(format!("{field} is {number}, expected 0 to {last}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_the_header_are_those_of_the_library() {
        let name = |number: &dyn std::fmt::Debug| format!("{number:?}").to_lowercase();
        for &collective in Collective::ALL {
            let number = CollectiveNumber::from_collective(collective);
            assert_eq!(name(&number), collective.name().replace('-', ""));
        }
        for operator in Operator::ALL {
            assert_eq!(name(&ReductionNumber::from_operator(operator)), operator.name());
        }
    }

    #[test]
    fn the_element_types_of_the_header_are_those_of_the_table() {
        let header = include_str!("../include/peerlane.h");
        let number = |line: &str| {
            let (name, number) = line.trim().strip_prefix("PEERLANE_DTYPE_")?.split_once(" = ")?;
            Some((name.to_lowercase(), number.trim_end_matches(',').parse::<u32>().ok()?))
        };
        let mut found: Vec<(String, u32)> = header.lines().filter_map(number).collect();
        let mut expected = DType::ALL.map(|dtype| (dtype.name().to_owned(), dtype.c_number()));

        found.sort();
        expected.sort();
        assert_eq!(found, expected);
    }
}
