//! Finds the places in the commands of a lane after which chunks of the output have arrived, and
//! before which chunks of the input must have departed.

use std::collections::BTreeMap;
use std::fmt;

use peerlane_hal::{Mark, Ticket};

use crate::plan::{Cell, Plan, Step};

/// The places in the commands of a lane where chunks arrive, and where they must have departed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    arrivals: ChunkOrder,
    departures: ChunkOrder,
}

/// Chunks with places in the commands of a lane, in the order of the places.
#[derive(Clone, Debug, Default)]
struct ChunkOrder {
    /// For an arrival, the number of commands after which the chunk is there. For a departure, the
    /// index of the first command that reads it.
    cells: Box<[(usize, Cell)]>,
    /// The position of each chunk in `cells`.
    positions: BTreeMap<Cell, usize>,
}

impl ChunkOrder {
    fn new(places: BTreeMap<Cell, usize>) -> Self {
        let mut cells: Vec<_> = places.into_iter().map(|(cell, place)| (place, cell)).collect();
        cells.sort_unstable();
        let positions = cells.iter().enumerate().map(|(at, &(_, cell))| (cell, at)).collect();
        Self { cells: cells.into(), positions }
    }

    fn in_order(&self) -> impl Iterator<Item = Cell> {
        self.cells.iter().map(|&(_, cell)| cell)
    }
}

impl Parts {
    /// Finds the places in commands, each of which has a step of the plan as its origin.
    pub(crate) fn new(plan: &Plan, origins: &[Step], tells: Handles) -> Self {
        let (mut arrivals, mut departures) = (BTreeMap::new(), BTreeMap::new());
        let arrives_with = plan.arrivals();
        for (index, step) in origins.iter().enumerate() {
            match (arrives_with(step).filter(|_| tells.arrivals), step) {
                (Some(cell), Step::Wait { .. }) => {
                    arrivals.entry(cell).or_insert(index + 1);
                }
                // Several commands can copy or add the pieces of a chunk, of which the last counts.
                (Some(cell), _) => {
                    arrivals.insert(cell, index + 1);
                }
                (None, _) => {}
            }

            if let Some(cell) = plan.departs_with(step).filter(|_| tells.departures) {
                departures.entry(cell).or_insert(index);
            }
        }
        Self { arrivals: ChunkOrder::new(arrivals), departures: ChunkOrder::new(departures) }
    }

    /// Returns the chunks of the output that arrive in the lane, in order.
    pub(crate) fn arriving(&self) -> impl Iterator<Item = Cell> {
        self.arrivals.in_order()
    }

    /// Returns whether a chunk of the output arrives in the lane.
    pub(crate) fn brings(&self, cell: Cell) -> bool {
        self.arrivals.positions.contains_key(&cell)
    }

    /// Returns the chunks of the input that the lane reads, in order.
    pub(crate) fn departing(&self) -> impl Iterator<Item = Cell> {
        self.departures.in_order()
    }
}

/// Says which handles the starts of an operation have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Handles {
    pub(crate) arrivals: bool,
    pub(crate) departures: bool,
}

impl Handles {
    pub(crate) fn any(self) -> bool {
        self.arrivals || self.departures
    }
}

impl fmt::Display for Handles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.arrivals, self.departures) {
            (false, false) => "none",
            (true, false) => "arrivals",
            (false, true) => "departures",
            (true, true) => "arrivals and departures",
        })
    }
}

/// The state of the parts of one start in a lane.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// Whether the newest start has handles.
    has_handles: bool,
    /// The places of the arrivals that were reached, in the order of [`Parts::arriving`].
    arrived: Vec<Mark>,
    /// Whether each chunk has departed, in the order of [`Parts::departing`].
    departed: Vec<bool>,
    /// The number of chunks that have departed before the first one that has not.
    departed_until: usize,
}

impl Gate {
    /// Begins a start with handles, or without.
    pub(crate) fn begin(&mut self, parts: &Parts, has_handles: bool) {
        self.has_handles = has_handles;
        self.arrived.clear();
        self.departed.clear();
        self.departed.resize(parts.departures.cells.len(), !has_handles);
        self.departed_until = if has_handles { 0 } else { self.departed.len() };
    }

    pub(crate) fn depart(&mut self, parts: &Parts, cell: Cell) {
        let Some(&position) = parts.departures.positions.get(&cell) else { return };
        self.departed[position] = true;
        while self.departed.get(self.departed_until) == Some(&true) {
            self.departed_until += 1;
        }
    }

    /// Returns whether the start reads a chunk that has not departed.
    pub(crate) fn misses(&self, parts: &Parts, cell: Cell) -> bool {
        let position = parts.departures.positions.get(&cell);
        position.is_some_and(|&position| self.departed.get(position) == Some(&false))
    }

    /// Returns the first chunk that has not departed, with the first command that reads it.
    pub(crate) fn first_missing(&self, parts: &Parts) -> Option<(usize, Cell)> {
        parts.departures.cells.get(self.departed_until).copied().filter(|_| self.has_handles)
    }

    /// Returns the end of the commands that can be submitted together from `next` on, or `None` if
    /// the next one reads what has not departed.
    ///
    /// They end where a chunk arrives, and before a command that reads what has not departed.
    pub(crate) fn end_after(&self, parts: &Parts, next: usize, end: usize) -> Option<usize> {
        if !self.has_handles {
            return Some(end);
        }

        let arrivals = &parts.arrivals.cells;
        let arrival = arrivals.get(arrivals.partition_point(|&(place, _)| place <= next));
        let stop = arrival.map_or(end, |&(place, _)| place.min(end));
        let stop = self.first_missing(parts).map_or(stop, |(place, _)| place.min(stop));
        (stop > next || next == end).then_some(stop)
    }

    /// Returns whether a chunk has arrived with the commands before `next`, and was not noted.
    pub(crate) fn reaches(&self, parts: &Parts, next: usize) -> bool {
        let arrival = parts.arrivals.cells.get(self.arrived.len()).filter(|_| self.has_handles);
        arrival.is_some_and(|&(place, _)| place <= next)
    }

    /// Notes the chunks that have arrived with the commands before `next`, behind which `mark` is.
    pub(crate) fn reach(&mut self, parts: &Parts, next: usize, mark: Mark) {
        while self.reaches(parts, next) {
            self.arrived.push(mark);
        }
    }

    /// Returns the place where a chunk has arrived: `None` if the lane has not submitted it yet.
    pub(crate) fn arrival(&self, parts: &Parts, cell: Cell) -> Option<Mark> {
        let position = *parts.arrivals.positions.get(&cell)?;
        self.arrived.get(position).copied()
    }
}

/// A place that every queue has reached, for chunks whose flags the host itself has seen.
pub(crate) const REACHED: Mark = Mark::Submitted(Ticket::NONE);

#[cfg(test)]
mod tests {
    use peerlane_hal::Rank;

    use super::*;
    use crate::collective::Collective;
    use crate::plan::{Algorithm, Flag, FlagOrder, LaneId};
    use crate::schedule::{self, Shape};
    use crate::topology::Topology;

    fn parts(collective: Collective, handles: Handles) -> (Vec<Step>, Parts) {
        let shape = Shape { collective, flags: FlagOrder::Interleaved, ..Shape::default() };
        let topology = Topology::flat(3).unwrap();
        let plan = schedule::plan(Algorithm::Direct, &topology, Rank(0), shape).unwrap();
        let steps = plan.closed_lane(LaneId::HOME, |_| true);
        let parts = Parts::new(&plan, &steps, handles);
        (steps, parts)
    }

    fn of(block: u32) -> Cell {
        Cell { block: Rank(block), chunk: 0 }
    }

    #[test]
    fn blocks_arrive_with_their_waits_in_the_order_of_the_plan() {
        let handles = Handles { arrivals: true, departures: false };
        let (steps, parts) = parts(Collective::AllGather, handles);
        assert_eq!(parts.arriving().collect::<Vec<_>>(), [of(2), of(0), of(1)]);
        for &(index, cell) in &parts.arrivals.cells {
            let step = steps[index - 1];
            let is_own = matches!(step, Step::Put { peer: Rank(0), .. });
            let is_wait =
                matches!(step, Step::Wait { flag: Flag::Arrived { cell: of, .. } } if of == cell);
            assert!(is_own || is_wait, "{cell}: {step:?}");
        }
    }

    #[test]
    fn a_lane_stops_where_a_block_has_not_departed_and_where_one_arrives() {
        let handles = Handles { arrivals: false, departures: true };
        let (steps, parts) = parts(Collective::ReduceScatter, handles);
        assert_eq!(parts.departing().collect::<Vec<_>>(), [of(1), of(2), of(0)]);

        let mut gate = Gate::default();
        assert_eq!(gate.end_after(&parts, 0, steps.len()), Some(steps.len()));

        gate.begin(&parts, true);
        let (first, _) = parts.departures.cells[0];
        assert_eq!(gate.end_after(&parts, 0, steps.len()), Some(first));
        assert_eq!(gate.end_after(&parts, first, steps.len()), None);
        // A later block does not replace the one that comes first.
        gate.depart(&parts, of(0));
        assert_eq!(gate.end_after(&parts, first, steps.len()), None);
        gate.depart(&parts, of(1));
        let (second, _) = parts.departures.cells[1];
        assert_eq!(gate.end_after(&parts, first, steps.len()), Some(second));
        assert!(gate.misses(&parts, of(2)) && !gate.misses(&parts, of(1)));
        gate.depart(&parts, of(2));
        assert_eq!(gate.end_after(&parts, second, steps.len()), Some(steps.len()));
    }
}
