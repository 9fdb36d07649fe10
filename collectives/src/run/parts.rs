//! Finds where the caller takes part in the commands of a lane: where chunks of the output have
//! arrived, and where chunks of the input are read.

use std::fmt;

use peerlane_hal::{Mark, Ticket};

use crate::plan::{Cell, Plan, Step};

/// The places in the commands of a lane where chunks arrive, and where they must have departed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Parts {
    /// The chunks of the output that arrive in the lane, each with the number of commands after
    /// which it is there, in order.
    arrivals: Box<[(usize, Cell)]>,
    /// The chunks of the input, each with the index of the first command that reads it, in order.
    departures: Box<[(usize, Cell)]>,
}

impl Parts {
    /// Finds the places in commands, each of which has a step of the plan as its origin.
    pub(crate) fn new(plan: &Plan, origins: &[Step], tells: Handles) -> Self {
        let (mut arrivals, mut departures) = (Vec::new(), Vec::new());
        let arrives_with = plan.arrivals();
        for (index, step) in origins.iter().enumerate() {
            if let Some(cell) = arrives_with(step).filter(|_| tells.arrivals) {
                // Several commands can copy or add the pieces of a chunk, of which the last counts.
                arrivals.retain(|&(_, known)| known != cell || is_wait(step));
                if arrivals.iter().all(|&(_, known)| known != cell) {
                    arrivals.push((index + 1, cell));
                }
            }

            if let Some(cell) = plan.departs_with(step).filter(|_| tells.departures)
                && departures.iter().all(|&(_, known)| known != cell)
            {
                departures.push((index, cell));
            }
        }
        Self { arrivals: arrivals.into(), departures: departures.into() }
    }

    /// Returns the chunks of the output that arrive in the lane, in order.
    pub(crate) fn arriving(&self) -> impl Iterator<Item = Cell> {
        self.arrivals.iter().map(|&(_, cell)| cell)
    }

    /// Returns the chunks of the input that the lane reads, in order.
    pub(crate) fn departing(&self) -> impl Iterator<Item = Cell> {
        self.departures.iter().map(|&(_, cell)| cell)
    }

    /// Returns the end of the commands that can be submitted together from `next` on: the next
    /// place where a chunk arrives, or is read and has not departed.
    fn end_after(&self, next: usize, end: usize, gate: &Gate) -> usize {
        let arrivals = self.arrivals.iter().map(|&(index, _)| index);
        let arrival = arrivals.filter(|&index| index > next).min();
        let departure = gate.first_missing(self);
        end.min(arrival.unwrap_or(end)).min(departure.unwrap_or(end)).max(next)
    }
}

fn is_wait(step: &Step) -> bool {
    matches!(step, Step::Wait { .. })
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
    is_open: bool,
    /// The places of the arrivals that were reached, in the order of [`Parts::arriving`].
    arrived: Vec<Mark>,
    /// The chunks that have departed.
    departed: Vec<Cell>,
}

impl Gate {
    /// Begins a start with handles, or without.
    pub(crate) fn begin(&mut self, has_handles: bool) {
        self.is_open = has_handles;
        self.arrived.clear();
        self.departed.clear();
    }

    pub(crate) fn depart(&mut self, cell: Cell) {
        self.departed.push(cell);
    }

    pub(crate) fn has_departed(&self, cell: Cell) -> bool {
        self.departed.contains(&cell)
    }

    /// Returns the index of the first command that reads a chunk which has not departed.
    fn first_missing(&self, parts: &Parts) -> Option<usize> {
        let mut departures = parts.departures.iter().filter(|_| self.is_open);
        departures.find(|(_, cell)| !self.has_departed(*cell)).map(|&(index, _)| index)
    }

    /// Returns the chunks that have not departed, of a start with handles.
    pub(crate) fn missing<'p>(&self, parts: &'p Parts) -> impl Iterator<Item = Cell> + use<'p, '_> {
        parts.departing().filter(|&cell| self.is_open && !self.has_departed(cell))
    }

    /// Returns the end of the commands that can be submitted together from `next` on, or `None` if
    /// the next one reads what has not departed.
    pub(crate) fn end_after(&self, parts: &Parts, next: usize, end: usize) -> Option<usize> {
        if !self.is_open {
            return Some(end);
        }
        let stop = parts.end_after(next, end, self);
        (stop > next || next == end).then_some(stop)
    }

    /// Notes the places that were reached with the commands before `next`.
    pub(crate) fn reach<E>(
        &mut self,
        parts: &Parts,
        next: usize,
        mut mark: impl FnMut() -> Result<Mark, E>,
    ) -> Result<(), E> {
        if !self.is_open {
            return Ok(());
        }
        while parts.arrivals.get(self.arrived.len()).is_some_and(|&(index, _)| index <= next) {
            let mark = mark()?;
            self.arrived.push(mark);
        }
        Ok(())
    }

    /// Returns the place where a chunk has arrived: `None` if the lane has not submitted it yet.
    pub(crate) fn arrival(&self, parts: &Parts, cell: Cell) -> Option<Mark> {
        let index = parts.arriving().position(|known| known == cell)?;
        self.arrived.get(index).copied()
    }
}

/// The place of what is complete already.
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
        for &(index, cell) in &parts.arrivals {
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

        gate.begin(true);
        let (first, _) = parts.departures[0];
        assert_eq!(gate.end_after(&parts, 0, steps.len()), Some(first));
        assert_eq!(gate.end_after(&parts, first, steps.len()), None);
        // A later block does not replace the one that comes first.
        gate.depart(of(0));
        assert_eq!(gate.end_after(&parts, first, steps.len()), None);
        gate.depart(of(1));
        let (second, _) = parts.departures[1];
        assert_eq!(gate.end_after(&parts, first, steps.len()), Some(second));
        assert_eq!(gate.missing(&parts).collect::<Vec<_>>(), [of(2)]);
        gate.depart(of(2));
        assert_eq!(gate.end_after(&parts, second, steps.len()), Some(steps.len()));
    }
}
