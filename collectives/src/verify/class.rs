//! Classes of faults.

use std::fmt;

use super::fault::Fault;

/// Classifies faults, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum FaultClass {
    /// The plans do not belong together.
    Disagreement,
    /// A plan names a rank, cell, source or lane that does not exist.
    Unknown,
    /// A byte of a result does not arrive.
    Missing,
    /// A byte of a result arrives more than once.
    Twice,
    /// A byte is read before it is known to have arrived.
    ReadEarly,
    /// Lanes wait for each other in a cycle.
    Deadlock,
    /// A flag has two writers or two readers.
    Shared,
    /// A flag has different numbers of signals and waits.
    Unbalanced,
    /// A wait could pass on the value of an earlier signal.
    Stale,
    /// Memory is overwritten while a rank may still read it.
    Overwritten,
    /// A step names a rank that the fabric of its lane does not reach.
    Unreachable,
}

impl FaultClass {
    /// All classes.
    pub const ALL: &'static [Self] = &[
        Self::Disagreement,
        Self::Unknown,
        Self::Missing,
        Self::Twice,
        Self::ReadEarly,
        Self::Deadlock,
        Self::Shared,
        Self::Unbalanced,
        Self::Stale,
        Self::Overwritten,
        Self::Unreachable,
    ];

    /// Returns a short name for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Disagreement => "disagreement",
            Self::Unknown => "unknown name",
            Self::Missing => "missing byte",
            Self::Twice => "byte twice",
            Self::ReadEarly => "read too early",
            Self::Deadlock => "deadlock",
            Self::Shared => "shared flag",
            Self::Unbalanced => "unbalanced flag",
            Self::Stale => "stale flag",
            Self::Overwritten => "overwritten too early",
            Self::Unreachable => "out of reach",
        }
    }
}

impl fmt::Display for FaultClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Fault {
    /// Returns the class of the fault.
    pub const fn class(&self) -> FaultClass {
        match self {
            Self::NoPlan | Self::Disagrees { .. } => FaultClass::Disagreement,
            Self::Chunks { .. }
            | Self::Outputs { .. }
            | Self::NoLane { .. }
            | Self::Unknown { .. }
            | Self::Reserved { .. }
            | Self::Collective { .. }
            | Self::OtherBlock { .. }
            | Self::NotRequired { .. }
            | Self::NotPlanned { .. } => FaultClass::Unknown,
            Self::NeverPut { .. } | Self::NotArrived { .. } => FaultClass::Missing,
            Self::PutTwice { .. } | Self::PutInPlace { .. } => FaultClass::Twice,
            Self::ReadEarly { .. } => FaultClass::ReadEarly,
            Self::Deadlock { .. } => FaultClass::Deadlock,
            Self::TwoWriters { .. } | Self::TwoReaders { .. } | Self::OtherReader { .. } => {
                FaultClass::Shared
            }
            Self::Unbalanced { .. } | Self::Uncounted { .. } => FaultClass::Unbalanced,
            Self::Repeated { .. } | Self::NotConsumed { .. } => FaultClass::Stale,
            Self::PeerInUse { .. } | Self::SourceInUse { .. } | Self::StillGot { .. } => {
                FaultClass::Overwritten
            }
            Self::AcrossTiers { .. } | Self::OutOfReach { .. } => FaultClass::Unreachable,
        }
    }
}
