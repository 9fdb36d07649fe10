//! Simulates the plans of all ranks over modelled links, to find when and why each step begins and
//! ends.
//!
//! This is a discrete-event simulation in whole picoseconds. It depends only on its arguments:
//! simultaneous events happen in order of rank and lane. It proves nothing; that is the task of
//! [`verify`].
//!
//! | modelled | how |
//! | --- | --- |
//! | lanes | steps run in order |
//! | puts and gets | a copy takes its lane for [`put_seconds`](Link::put_seconds) or [`get_seconds`](Link::get_seconds), and then moves its bytes; the lane goes on meanwhile if several copies may be [in flight](Link::puts_in_flight), else it waits for the end |
//! | bytes that a peer has just put here | they start [later](Link::passed_on_seconds) and move [more slowly](Link::passed_on_bytes_per_second) |
//! | signals | a signal follows all puts of its lane to the reader; a signal of a rank to itself follows all puts of its lane; the flag is set after [`flag_seconds`](Link::flag_seconds) |
//! | waits | a wait blocks its lane until the flag is set |
//! | sharing | flows share engines, the links into and out of a rank, NICs, processors and memory in equal parts; puts of one lane to one peer run one after the other, and up to 8 to different peers move their bytes at once |
//! | the host | it submits puts to its engines meanwhile, and a start takes at least [that time](Link::submit_seconds) |
//!
//! [`verify`]: crate::verify

// The files of this module:
//
// | file | holds |
// | --- | --- |
// | `program` | the steps of all ranks, packed and linked |
// | `machine` | lanes, and the events that drive them |
// | `flows` | transfers in progress, and the resources that they share |
// | `event_queue` | the queue of events |
// | `result` | what the simulation returns, with the critical path |

use peerlane_hal::{ErrorKind, Rank};

#[cfg(doc)]
use crate::cost::Link;
use crate::cost::Links;
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::{Plan, Step};
use crate::topology::Topology;

mod event_queue;
mod flows;
mod machine;
mod program;
mod result;

pub use flows::LinkClass;
use machine::{Machine, Recorder, TIME_MAX};
pub use program::STEPS_MAX;
use program::{Compiler, Program, StepId};
pub use result::{Incast, PathStep, RankUse, Simulation, Slice, Traffic, Utilisation};

/// The options of a simulation, such as start delays and traced ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// The start delay of each rank in picoseconds; ranks beyond the end of the list start at 0.
    pub delays: Vec<u64>,
    /// The ranks whose steps are recorded as [slices](Simulation::slices).
    pub traced: Vec<Rank>,
    /// Whether all lanes except the first fork from the caller's stream and join it, instead of
    /// waiting for flags.
    pub forks: bool,
}

/// Simulates one execution of an operation with the plan that `plan_of` returns for each rank.
///
/// Plans are requested in rank order, packed and dropped. Plans of ranks on the critical path and
/// of traced ranks are requested again, and must be the same as before.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) or [`Mismatch`](ErrorKind::Mismatch) if the
/// arguments are inconsistent or too large, or if a plan has a fault that stops the simulation; the
/// errors of `plan_of` unchanged.
pub fn simulate(
    topology: &Topology,
    layout: &Layout,
    links: &Links,
    options: &Options,
    mut plan_of: impl FnMut(Rank) -> Result<Plan, Error>,
) -> Result<Simulation, Error> {
    check(topology, layout, links, options)?;
    let program = compile(layout, options, &mut plan_of)?;

    // The recorder searches the traced ranks, so they must be sorted and different.
    let mut traced = options.traced.clone();
    traced.sort_unstable();
    traced.dedup();
    let recorder = Recorder::new(topology.ranks(), &program, &traced);

    // The rates of copies depend on whether the bytes that a rank accesses fit into caches. The
    // plans determine how many bytes these are.
    let links = &links.adjusted_to(program.accessed_bytes(layout));
    let mut machine = Machine::new(&program, topology, links, &options.delays, recorder);
    machine.run();

    if machine.exceeds_clock() {
        let days = TIME_MAX / 1_000_000_000_000 / 86_400;
        return Err(program::invalid(format!(
            "the simulated operation takes more than {days} days, the maximum of a simulation; use shorter blocks or \
             faster links"
        )));
    }

    if let Some((id, why)) = result::deadlock(&machine, &program) {
        return Err(fault(id, why, options, &mut plan_of));
    }

    // The machine keeps no plan steps, so plans are requested again for the steps to report.
    result::collect(&machine, &program, topology, &mut |rank| {
        closed_lanes(rank, options, &mut plan_of)
    })
}

/// Checks that the arguments of [`simulate`] have the same number of ranks, and that the links are
/// valid.
fn check(
    topology: &Topology,
    layout: &Layout,
    links: &Links,
    options: &Options,
) -> Result<(), Error> {
    links.check()?;

    let ranks = topology.ranks();
    if layout.ranks() != ranks {
        let found = layout.ranks();
        let text = format!(
            "the layout has {found} ranks, expected {ranks}, the number of ranks of the topology"
        );
        return Err(Error::new(ErrorKind::Mismatch, text));
    }

    if options.delays.len() > ranks {
        let delays = options.delays.len();
        return Err(program::invalid(format!(
            "delays has {delays} entries, expected at most {ranks}, one for each rank"
        )));
    }

    match options.traced.iter().find(|rank| rank.index() >= ranks) {
        Some(rank) => Err(program::invalid(format!(
            "traced names rank {rank}, which does not exist in the topology of {topology}"
        ))),
        None => Ok(()),
    }
}

/// Builds the program to simulate from the plans that `plan_of` returns for all ranks.
fn compile(
    layout: &Layout,
    options: &Options,
    plan_of: &mut impl FnMut(Rank) -> Result<Plan, Error>,
) -> Result<Program, Error> {
    // A single plan can be large, so the flags are checked before one is requested. A plan without
    // lanes is refused, so the flags of one lane are a lower bound.
    program::check_flags(layout, 1)?;

    let first = plan_of(Rank(0))?;
    let mut compiler = Compiler::new(layout, &first)?;
    compiler.push(&first, !options.forks)?;
    drop(first);

    for rank in Rank::all(layout.ranks()).skip(1) {
        compiler.push(&plan_of(rank)?, !options.forks)?;
    }

    compiler.link().map_err(|(id, why)| fault(id, why, options, plan_of))
}

/// Requests the plan of `rank`, and returns all steps of each of its lanes.
///
/// They include the signals and waits by which a lane begins and ends.
fn closed_lanes(
    rank: Rank,
    options: &Options,
    plan_of: &mut impl FnMut(Rank) -> Result<Plan, Error>,
) -> Result<Vec<Vec<Step>>, Error> {
    let plan = plan_of(rank)?;
    Ok(plan.lane_ids().map(|lane| plan.closed_lane(lane, |_| !options.forks)).collect())
}

/// Returns an error with the position and the text of the step `id`, and with its fault `why`.
///
/// If the plan cannot be requested again, that error is returned instead.
fn fault(
    id: StepId,
    why: &str,
    options: &Options,
    plan_of: &mut impl FnMut(Rank) -> Result<Plan, Error>,
) -> Error {
    let StepId { rank, lane, index } = id;
    let step = match closed_lanes(rank, options, plan_of) {
        Ok(lanes) => lanes.get(lane.index()).and_then(|steps| steps.get(index)).copied(),
        Err(error) => return error,
    };

    // The step can be missing if the plan is not the same as before.
    let text = step.map_or(String::new(), |step| format!(" `{}`", step.display_for(rank)));
    program::invalid(format!("step {index} of lane {lane} of rank {rank}{text}: {why}"))
}
