//! Defines traces, which record when each copy, signal and wait of an operation began and ended.
//!
//! Times are those at which this rank observed events. A step begins when it has been submitted and
//! the step before it in its lane has ended, which is exact for engines that execute one step after
//! another.

use serde::{Deserialize, Serialize};

use crate::plan::{LaneId, Step, Tier};

/// Records when each step of one operation began and ended on one rank, grouped by start of the
/// operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Trace {
    /// The rank that was traced.
    pub rank: u32,
    /// The lanes of the rank's plan, each with the engine that executed its steps.
    pub lanes: Vec<TracedLane>,
    /// The recorded starts (executions) of the operation, in order.
    pub starts: Vec<TracedStart>,
    /// Whether later steps are missing because the trace reached its maximum size.
    pub is_cut: bool,
}

/// Describes the engine that executed the steps of one lane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedLane {
    /// The number of the lane in the plan.
    pub lane: LaneId,
    /// Whether the engine copies inside a node or over the network.
    pub tier: Tier,
    /// The backend of the engine, such as `host`.
    pub backend: String,
}

/// Records one start (execution) of the operation, with the times of its steps.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStart {
    /// The number of this execution of the operation, counted from 1.
    pub epoch: u64,
    /// The time at which the start began, in nanoseconds since 1970.
    ///
    /// It relates the traces of several ranks.
    pub unix_ns: u64,
    /// The executed steps of all lanes with their times, lane by lane.
    pub steps: Vec<TracedStep>,
}

/// Records one executed step, with times in nanoseconds after the start began.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedStep {
    /// The number of the lane that contains the step.
    pub lane: LaneId,
    /// The step of the plan that was executed.
    ///
    /// A copy in several pieces has several traced steps. Puts of neighboring bytes that are one
    /// copy have one, that of the first put. Additions to one target that are one reduction have
    /// one, that of the first contribution.
    pub step: Step,
    /// The number of bytes of the copy, or of the result of a reduction; 0 for a signal or a wait.
    pub bytes: u64,
    /// The time at which the step was submitted to the engine or first polled.
    pub submitted_ns: u64,
    /// The time from which the engine could execute the step.
    ///
    /// The step had been submitted, and all steps before it in its lane had ended.
    pub begin_ns: u64,
    /// The time at which the rank observed that the step was complete; `None` if the rank did not.
    pub end_ns: Option<u64>,
}
