//! What an operation did on this rank, and when: the record of starts that were traced.
//!
//! The times are those at which this rank saw things. A step begins when it has been submitted and the
//! step before it in its lane has ended; that is exact where engines take one step after the other.

use serde::{Deserialize, Serialize};

use crate::plan::{LaneId, Step, Tier};

/// The traced starts of one operation on one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// Whose.
    pub rank: u32,
    /// The lanes in which this rank has something to do.
    pub lanes: Vec<TracedLane>,
    /// In the order of the starts.
    pub starts: Vec<TracedStart>,
    /// Whether later steps are missing, because there were more than are kept.
    pub is_cut: bool,
}

/// One lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedLane {
    /// Its number in the plan.
    pub lane: LaneId,
    /// Which fabric it is on.
    pub tier: Tier,
    /// Whose engine it has, such as `host`.
    pub backend: String,
}

/// One start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStart {
    /// Its number, from 1.
    pub epoch: u64,
    /// When it was made, in nanoseconds of the system's clock since 1970: what traces of several ranks
    /// have in common.
    pub unix_ns: u64,
    /// The steps of all lanes, lane by lane.
    pub steps: Vec<TracedStep>,
}

/// One step; times in nanoseconds since its start was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStep {
    /// In which lane.
    pub lane: LaneId,
    /// What it does. A copy in several pieces is as many traced steps.
    pub step: Step,
    /// The bytes that it copies.
    pub bytes: u64,
    /// When it was given to the engine, or first looked at.
    pub submitted_ns: u64,
    /// When nothing before it in the lane was open any more.
    pub begin_ns: u64,
    /// When it was seen complete, if it was.
    pub end_ns: Option<u64>,
}
