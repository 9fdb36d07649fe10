//! Defines traces, which record the timed steps of an operation on this rank.
//!
//! Times are those at which this rank observed events. A step begins when it has been submitted and the step before it in its
//! lane has ended, which is exact for engines that execute one step after another.

use serde::{Deserialize, Serialize};

use crate::plan::{LaneId, Step, Tier};

/// The timed steps of one operation on one rank, grouped by start of the operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The rank that was traced.
    pub rank: u32,
    /// The lanes in which this rank has work.
    pub lanes: Vec<TracedLane>,
    /// The traced starts of the operation, in order of execution.
    pub starts: Vec<TracedStart>,
    /// Whether the trace lacks later steps because there were too many.
    pub is_cut: bool,
}

/// The properties of a lane whose steps were traced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedLane {
    /// The number of the lane in the plan.
    pub lane: LaneId,
    /// The tier of the fabric that carries the lane.
    pub tier: Tier,
    /// The backend of the lane's engine, such as `host`.
    pub backend: String,
}

/// One start of an operation, with its timed steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStart {
    /// The number of the operation's start, counted from 1.
    pub epoch: u64,
    /// The time of the start in nanoseconds since 1970, which relates traces of several ranks.
    pub unix_ns: u64,
    /// The timed steps of all lanes, lane by lane.
    pub steps: Vec<TracedStep>,
}

/// A timed step, with times in nanoseconds after the start of the operation began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStep {
    /// The lane that executed the step.
    pub lane: LaneId,
    /// The step of the plan that was executed. A copy in several pieces has several traced steps.
    pub step: Step,
    /// The number of bytes that the step copies; 0 for a signal or a wait.
    pub bytes: u64,
    /// The time at which the step was submitted or first polled.
    pub submitted_ns: u64,
    /// The time at which the step had been submitted and all steps before it in its lane had ended.
    pub begin_ns: u64,
    /// The time at which the step was found complete; `None` if it was not.
    pub end_ns: Option<u64>,
}
