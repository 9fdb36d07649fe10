//! What is counted and recorded on the way.

use std::ops::Range;

use peerlane_hal::Rank;

use super::program::Program;
use super::resources::Way;

/// Bytes of each rank and way, and the steps of the ranks that are traced.
#[derive(Debug)]
pub(super) struct Meter {
    /// By rank, then way.
    pub(super) sent: Vec<u64>,
    pub(super) received: Vec<u64>,
    /// What handing over its puts costs each rank's host, in picoseconds.
    pub(super) host: Vec<u64>,
    /// The steps that are traced.
    traced: Vec<Range<u32>>,
    /// A step, when it began and when it ended, in the order of ends.
    pub(super) slices: Vec<(u32, u64, u64)>,
}

impl Meter {
    /// Nothing counted yet; `traced` are ranks in order, each once.
    pub(super) fn new(ranks: usize, program: &Program, traced: &[Rank]) -> Self {
        let lanes = program.lanes();
        let steps = |rank: &Rank| {
            let first = rank.index() * lanes;
            program.first[first]..program.first[first + lanes]
        };
        Self {
            sent: vec![0; ranks * Way::ALL.len()],
            received: vec![0; ranks * Way::ALL.len()],
            host: vec![0; ranks],
            traced: traced.iter().map(steps).collect(),
            slices: Vec::new(),
        }
    }

    pub(super) fn bytes(&mut self, from: Rank, to: Rank, way: Way, bytes: u64) {
        self.sent[from.index() * Way::ALL.len() + way as usize] += bytes;
        self.received[to.index() * Way::ALL.len() + way as usize] += bytes;
    }

    pub(super) fn submit(&mut self, rank: Rank, picoseconds: u64) {
        let host = &mut self.host[rank.index()];
        *host = host.saturating_add(picoseconds);
    }

    pub(super) fn instant(&mut self, step: u32, at: u64) {
        self.slice(step, at, at);
    }

    pub(super) fn slice(&mut self, step: u32, begin: u64, end: u64) {
        let before = self.traced.partition_point(|steps| steps.end <= step);
        if self.traced.get(before).is_some_and(|steps| steps.contains(&step)) {
            self.slices.push((step, begin, end));
        }
    }
}
