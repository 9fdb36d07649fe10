//! Predicts the time, traffic and memory of a collective operation from link rates.

use std::fmt;

use peerlane_hal::ErrorKind;
use serde::Serialize;

use super::calibration::correction;
use crate::error::Error;
use crate::layout::FlagLayout;
use crate::links::Links;
use crate::plan::Algorithm;
use crate::schedule::estimate::{ClusterSums, CostRequest, Term, Traffic, total, touched_bytes};
use crate::schedule::{self, Shape};
use crate::topology::Topology;
use crate::units::{bytes, time};

/// The predicted time, traffic and memory of a collective operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Cost {
    /// The predicted time of one operation in picoseconds, if many run one after another. It is the
    /// sum of the [terms](Self::terms).
    pub picoseconds: u64,
    /// The parts of the predicted time, such as puts and flags, in order.
    ///
    /// They are on the longest path through the plans.
    pub terms: Vec<Term>,
    /// The number of bytes that ranks copy from their own input to their own output.
    pub own: Traffic,
    /// The number of bytes that ranks put and get inside nodes.
    pub local: Traffic,
    /// The number of bytes that ranks put and get over the network.
    pub network: Traffic,
    /// The total length in bytes of the input, outputs, inboxes and flags of the rank that has the
    /// most.
    pub memory_bytes: u64,
}

/// Predicts the time, traffic and memory of a collective operation.
///
/// The block of rank r has `block_bytes[r]` bytes.
///
/// Equal arguments give equal results on all machines.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if the links are impossible, there are not as
/// many blocks as ranks, the shape has no chunks or outputs, the root does not exist, or the
/// algorithm does not suit the collective or the topology.
pub fn predict(
    algorithm: Algorithm,
    topology: &Topology,
    shape: Shape,
    block_bytes: &[u64],
    links: &Links,
) -> Result<Cost, Error> {
    links.check()?;
    check_blocks(topology, block_bytes)?;

    // Without chunks the formulas would divide by 0, and without outputs nothing could be written.
    // The number of inboxes is checked with the algorithm.
    for (name, count) in [("chunks", shape.chunks), ("outputs", shape.outputs)] {
        if count == 0 {
            return Err(invalid(format!("{name} is 0, expected at least 1")));
        }
    }

    schedule::check_fits(algorithm, topology, shape)?;

    let sums = ClusterSums::new(topology, shape.collective, block_bytes);
    let adjusted = links.adjusted_to(touched_bytes(&sums, shape));
    Ok(cost(&CostRequest { algorithm, sums: &sums, shape, links: &adjusted }))
}

/// Checks that there is one block length for each rank.
pub(super) fn check_blocks(topology: &Topology, block_bytes: &[u64]) -> Result<(), Error> {
    if block_bytes.len() == topology.ranks() {
        return Ok(());
    }

    let ranks = topology.ranks();
    let blocks = block_bytes.len();
    Err(invalid(format!("block_bytes has {blocks} blocks, expected one for each of {ranks} ranks")))
}

/// Predicts the time, traffic and memory of one algorithm.
///
/// The link rates must already be [adjusted](Links::adjusted_to) to the size of the operation.
pub(super) fn cost(request: &CostRequest<'_>) -> Cost {
    let mut terms = terms(request);
    correct(&mut terms, correction(&request.links.residuals, request));
    let picoseconds = total(&terms);

    // In place there is no self copy, and in a reduction additions take its place.
    let &CostRequest { sums, shape, .. } = request;
    let copied = u64::from(!shape.in_place && !shape.collective.is_reduction());
    let own = Traffic {
        rank_bytes_max: sums.block_bytes_max * copied,
        total_bytes: sums.own_bytes * copied,
    };
    let [local, network] = (schedule::schedule(request.algorithm).traffic)(request);

    let memory_bytes = touched_bytes(sums, shape).saturating_add(flag_bytes(request));
    Cost { picoseconds, terms, own, local, network, memory_bytes }
}

/// Returns the parts of the predicted time for the node size that has the longest path.
fn terms(request: &CostRequest<'_>) -> Vec<Term> {
    let paths = request.sums.node_ranks().map(|node_ranks| path_terms(request, node_ranks));

    // Among equal paths the first one, of the smallest node, is used.
    paths
        .reduce(|longest, path| if total(&path) > total(&longest) { path } else { longest })
        .unwrap_or_default()
}

/// Returns the parts of the predicted time of the longest path, for a node with `node_ranks` ranks.
fn path_terms(request: &CostRequest<'_>, node_ranks: u64) -> Vec<Term> {
    let path = (schedule::schedule(request.algorithm).estimate)(request, node_ranks);
    let mut terms = vec![Term::new("start", request.links.start(request.local_lanes()), "")];
    terms.extend(path.terms.into_iter().filter(|term| term.picoseconds > 0));

    // In a sequence of starts, the slower of host and engines limits the rate.
    let engines = total(&terms);
    if path.host > engines {
        let note = format!("hides {} on the engines", time(engines));
        return vec![Term::new("calls of the host", path.host, note)];
    }

    terms
}

/// Multiplies the times of all `terms` by a measured `factor`, and notes this in the first term.
fn correct(terms: &mut [Term], factor: f64) {
    if factor == 1.0 {
        return;
    }

    for term in terms.iter_mut() {
        term.picoseconds = (term.picoseconds as f64 * factor) as u64;
    }

    if let Some(Term { note, .. }) = terms.first_mut() {
        let measured = format!("all of it × {factor:.2}, as measured");
        *note = if note.is_empty() { measured } else { format!("{note}; {measured}") };
    }
}

fn flag_bytes(request: &CostRequest<'_>) -> u64 {
    let &CostRequest { sums, shape, .. } = request;
    let flags = FlagLayout::new(sums.ranks as usize, shape.chunks, request.lanes());
    let words = flags.for_collective(shape.collective).words();

    // A word has 8 bytes.
    words.saturating_mul(8).saturating_mul(shape.flag_sets().into())
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

impl Cost {
    /// Returns the predicted time in seconds.
    pub fn seconds(&self) -> f64 {
        self.picoseconds as f64 / 1e12
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", time(self.picoseconds))?;

        for Term { name, picoseconds, note } in &self.terms {
            let note = if note.is_empty() { String::new() } else { format!("  {note}") };
            writeln!(f, "  {:>9}  {name}{note}", time(*picoseconds))?;
        }

        let traffics =
            [("self copies", self.own), ("local", self.local), ("network", self.network)];
        for (name, traffic) in traffics {
            if traffic.total_bytes > 0 {
                let Traffic { rank_bytes_max, total_bytes } = traffic;
                let rank = bytes(rank_bytes_max);
                let total = bytes(total_bytes);
                writeln!(f, "  {name}: {total} in all, at most {rank} of one rank")?;
            }
        }

        writeln!(f, "  memory of one rank: {}", bytes(self.memory_bytes))
    }
}
