//! Defines traces, which record when each copy, signal and wait of an operation began and ended.
//!
//! Times are those at which this rank observed events. A step begins when it has been submitted and
//! the step before it in its lane has ended, which is exact for engines that execute one step after
//! another.

use serde::{Deserialize, Serialize};

use crate::plan::{LaneId, Step, Tier};

/// The recorded times of all steps of one operation on one rank. They are grouped by start of the
/// operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The rank that was traced.
    pub rank: u32,
    /// The sequences of steps of this rank, each with its engine.
    pub lanes: Vec<TracedLane>,
    /// The recorded runs of the operation, in order.
    pub starts: Vec<TracedStart>,
    /// Whether later steps are missing because the trace reached its maximum size.
    pub is_cut: bool,
}

/// The engine that executed one sequence of steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedLane {
    /// The number of the sequence of steps in the plan.
    pub lane: LaneId,
    /// Whether the engine copies inside a node or over the network.
    pub tier: Tier,
    /// The backend of the engine, such as `host`.
    pub backend: String,
}

/// One run of the operation, with its timed steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStart {
    /// The number of the run, counted from 1.
    pub epoch: u64,
    /// The time at which the run began, in nanoseconds since 1970, which relates traces of several
    /// ranks.
    pub unix_ns: u64,
    /// The timed copies, signals and waits of all lanes, lane by lane.
    pub steps: Vec<TracedStep>,
}

/// One copy, signal or wait, with times in nanoseconds after the operation began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStep {
    /// The number of the sequence of steps that contains the step.
    pub lane: LaneId,
    /// The step of the plan that was executed. A copy in several pieces has several traced steps.
    pub step: Step,
    /// The number of bytes that the step copies; 0 for a signal or a wait.
    pub bytes: u64,
    /// The time at which the step was submitted to the engine or first polled.
    pub submitted_ns: u64,
    /// The time from which the engine could execute the step.
    ///
    /// The step had been submitted, and all steps before it in its lane had ended.
    pub begin_ns: u64,
    /// The time at which the step was seen to be complete; `None` if the step was not seen to be
    /// complete.
    pub end_ns: Option<u64>,
}
