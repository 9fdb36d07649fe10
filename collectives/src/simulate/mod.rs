//! Simulates the plans of all ranks over links: when everything would happen, and why not sooner.
//!
//! A discrete-event simulation of one start, in whole picoseconds, that depends on nothing but its
//! arguments: events happen in order of time, rank, lane. It is no proof; [`verify`] is. What is
//! modelled:
//!
//! - A lane works off its steps in order. A put takes its lane for
//!   [`put_seconds`](Link::put_seconds), a get for [`get_seconds`](Link::get_seconds), and then moves
//!   its bytes, [later](Link::passed_on_seconds) and
//!   [more slowly](Link::passed_on_bytes_per_second) where a peer has just put them here; where several may be [in flight](Link::puts_in_flight), the lane goes on meanwhile, else it waits
//!   for the end.
//! - A signal follows all puts of its lane to the reader, one to the own rank all puts of its lane.
//!   Its flag is there after [`flag_seconds`](Link::flag_seconds). A wait holds its lane.
//! - Flows share, in equal parts, engines, the ways into and out of a rank, network cards,
//!   processors and memory. Puts of one lane to one peer follow each other; to different peers up to
//!   8 that are in flight move their bytes at once.
//! - A rank's host hands puts over to its engines meanwhile, and a start takes no less than
//!   [that](Link::submit_seconds).
//!
//! [`verify`]: crate::verify

use peerlane_hal::{ErrorKind, Rank};

#[cfg(doc)]
use crate::cost::Link;
use crate::cost::Links;
use crate::error::Error;
use crate::layout::Layout;
use crate::plan::{Plan, Step, StepOf};
use crate::topology::Topology;

mod agenda;
mod flows;
mod lane;
mod machine;
mod meter;
mod outcome;
mod packed;
mod path;
mod program;
mod resources;

use machine::Machine;
use meter::Meter;
pub use outcome::{Incast, RankUse, Simulation, Slice, Traffic, Utilisation};
pub use path::Stage;
pub use program::STEPS_MAX;
use program::{Compiler, Place, Program};
pub use resources::Way;

/// How to simulate.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// How much later than the others each rank starts, in picoseconds, by rank; those beyond the
    /// end start at once.
    pub delays: Vec<u64>,
    /// The ranks whose steps are recorded as [slices](Simulation::slices).
    pub traced: Vec<Rank>,
    /// Whether lanes other than home fork from the caller's stream and join it; else they are
    /// entered and left by flags.
    pub forks: bool,
}

/// Simulates one start of the plans that `plan_of` makes.
///
/// Plans are made in rank order, packed and dropped; those of ranks on the critical path and of
/// traced ranks are made once more, and must come out the same.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) or [`Mismatch`](ErrorKind::Mismatch) if the
/// arguments do not fit together or are too large, or a plan has a fault that stops the simulation;
/// the errors of `plan_of` as they are.
pub fn simulate(
    topology: &Topology,
    layout: &Layout,
    links: &Links,
    options: &Options,
    mut plan_of: impl FnMut(Rank) -> Result<Plan, Error>,
) -> Result<Simulation, Error> {
    check(topology, layout, links, options)?;
    let program = compile(layout, options, &mut plan_of)?;
    let mut traced = options.traced.clone();
    traced.sort_unstable();
    traced.dedup();
    let meter = Meter::new(topology.ranks(), &program, &traced);
    let links = &links.reaching(program.reach_bytes(layout));
    let mut machine = Machine::new(&program, topology, links, &options.delays, meter);
    machine.run();
    if let Some((place, why)) = outcome::fault(&machine, &program) {
        return Err(fault(place, why, options, &mut plan_of));
    }
    outcome::collect(&machine, &program, topology, &mut |rank| closed(rank, options, &mut plan_of))
}

fn check(
    topology: &Topology,
    layout: &Layout,
    links: &Links,
    options: &Options,
) -> Result<(), Error> {
    links.check()?;
    let ranks = topology.ranks();
    if layout.ranks() != ranks {
        let seen = layout.ranks();
        let text =
            format!("ranks of the layout is {seen}, expected those of the topology, {ranks}");
        return Err(Error::new(ErrorKind::Mismatch, text));
    }
    if options.delays.len() > ranks {
        let delays = options.delays.len();
        return Err(program::invalid(format!("delays has {delays} entries for {ranks} ranks")));
    }
    match options.traced.iter().find(|rank| rank.index() >= ranks) {
        Some(rank) => Err(program::invalid(format!(
            "traced names rank {rank}, expected a rank of {topology}"
        ))),
        None => Ok(()),
    }
}

fn compile(
    layout: &Layout,
    options: &Options,
    plan_of: &mut impl FnMut(Rank) -> Result<Plan, Error>,
) -> Result<Program, Error> {
    let first = plan_of(Rank(0))?;
    let mut compiler = Compiler::new(layout, &first)?;
    compiler.push(&first, !options.forks)?;
    drop(first);
    for rank in Rank::all(layout.ranks()).skip(1) {
        compiler.push(&plan_of(rank)?, !options.forks)?;
    }
    compiler.link().map_err(|(place, why)| fault(place, why, options, plan_of))
}

/// The steps of every lane of a rank, with entry and exit.
fn closed(
    rank: Rank,
    options: &Options,
    plan_of: &mut impl FnMut(Rank) -> Result<Plan, Error>,
) -> Result<Vec<Vec<Step>>, Error> {
    let plan = plan_of(rank)?;
    Ok(plan.lane_ids().map(|lane| plan.closed_lane(lane, |_| !options.forks)).collect())
}

/// The error of a step that stops the simulation.
fn fault(
    place: Place,
    why: &str,
    options: &Options,
    plan_of: &mut impl FnMut(Rank) -> Result<Plan, Error>,
) -> Error {
    let Place { rank, lane, index } = place;
    let step = match closed(rank, options, plan_of) {
        Ok(lanes) => lanes.get(lane.index()).and_then(|steps| steps.get(index)).copied(),
        Err(error) => return error,
    };
    let text = step.map_or(String::new(), |step| format!(" `{}`", StepOf { rank, step }));
    program::invalid(format!("step {index} of lane {lane} of rank {rank}{text}: {why}"))
}
