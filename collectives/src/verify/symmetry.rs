//! Finds rotations of the ranks that leave a set of plans unchanged.
//!
//! Ranks form a grid, and a rotation moves rows and columns on by some places, each in a circle. If every plan is the rotated
//! plan of one rank of its orbit, then whatever holds for that rank holds for the whole orbit.

use peerlane_hal::Rank;

use crate::plan::{Cell, Flag, Plan, Step};
use crate::topology::Topology;

/// A rotation by a number of rows and of columns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Turn {
    rows: u32,
    columns: u32,
}

/// The rotations under which ranks represent each other.
#[derive(Clone, Debug)]
pub(super) struct Symmetry {
    /// The ranks, row by row.
    grid: Vec<Rank>,
    /// The row and the column of every rank.
    places: Vec<(u32, u32)>,
    rows: u32,
    columns: u32,
    /// Whether turns move rows, and whether they move columns.
    moves: (bool, bool),
}

impl Symmetry {
    /// Creates the symmetry in which every rank represents itself.
    pub(super) fn none(ranks: usize) -> Self {
        Self::new(Rank::all(ranks).collect(), 1, (false, false))
    }

    /// Returns the possible symmetries of plans for a topology, those with the fewest orbits first.
    ///
    /// With `keeps_nodes`, ranks of one node stay on one node.
    pub(super) fn candidates(topology: &Topology, keeps_nodes: bool) -> Vec<Self> {
        let circle = || Self::new(Rank::all(topology.ranks()).collect(), 1, (true, false));
        let nodes = || (0u32..).take(topology.nodes());
        let columns = topology.members(0).len();
        let is_even = nodes().all(|node| topology.members(node).len() == columns);
        let mut candidates = Vec::new();
        if !keeps_nodes || topology.nodes() == 1 {
            candidates.push(circle());
        }
        if is_even && topology.nodes() > 1 {
            let grid: Vec<Rank> =
                nodes().flat_map(|node| topology.members(node)).copied().collect();
            candidates.push(Self::new(grid.clone(), columns, (true, true)));
            candidates.push(Self::new(grid, columns, (true, false)));
        }
        candidates
    }

    fn new(grid: Vec<Rank>, columns: usize, moves: (bool, bool)) -> Self {
        let (rows, columns) = (Rank::at(grid.len() / columns).0, Rank::at(columns).0);
        let mut places = vec![(0, 0); grid.len()];
        for (at, rank) in (0u32..).zip(&grid) {
            places[rank.index()] = (at / columns, at % columns);
        }
        Self { grid, places, rows, columns, moves }
    }

    pub(super) fn ranks(&self) -> usize {
        self.grid.len()
    }

    /// Returns the representatives, in the order of their numbers.
    pub(super) fn representatives(&self) -> Vec<Rank> {
        self.grid.iter().copied().filter(|&rank| self.turn_of(rank) == Turn::default()).collect()
    }

    /// Returns the number of ranks that each representative represents.
    pub(super) fn orbit(&self) -> usize {
        let of = |moves, count| if moves { count as usize } else { 1 };
        of(self.moves.0, self.rows) * of(self.moves.1, self.columns)
    }

    /// Returns the number of the representative of `rank`.
    pub(super) fn number(&self, rank: Rank) -> usize {
        let (row, column) = self.places[rank.index()];
        let row = if self.moves.0 { 0 } else { row };
        let column = if self.moves.1 { 0 } else { column };
        // Only whole rows and whole columns are left out, so the others count on without a gap.
        let columns = if self.moves.1 { 1 } else { self.columns };
        row as usize * columns as usize + column as usize
    }

    /// Returns the rotation from the representative of `rank` to `rank`.
    pub(super) fn turn_of(&self, rank: Rank) -> Turn {
        let (row, column) = self.places[rank.index()];
        let of = |moves, by| if moves { by } else { 0 };
        Turn { rows: of(self.moves.0, row), columns: of(self.moves.1, column) }
    }

    /// Returns the rotation from `rank` to its representative.
    pub(super) fn turn_back(&self, rank: Rank) -> Turn {
        let Turn { rows, columns } = self.turn_of(rank);
        let back = |by, count| if by == 0 { 0 } else { count - by };
        Turn { rows: back(rows, self.rows), columns: back(columns, self.columns) }
    }

    /// Returns the rank to which `turn` moves `rank`.
    pub(super) fn turned(&self, turn: Turn, rank: Rank) -> Rank {
        if turn == Turn::default() {
            return rank;
        }
        let on = |at: u32, by: u32, count: u32| {
            if at >= count - by { at - (count - by) } else { at + by }
        };
        let (row, column) = self.places[rank.index()];
        let (row, column) = (on(row, turn.rows, self.rows), on(column, turn.columns, self.columns));
        self.grid[(row * self.columns + column) as usize]
    }

    pub(super) fn turned_cell(&self, turn: Turn, cell: Cell) -> Cell {
        Cell { shard: self.turned(turn, cell.shard), chunk: cell.chunk }
    }

    pub(super) fn turned_flag(&self, turn: Turn, flag: Flag) -> Flag {
        match flag {
            Flag::Ready { from, lane } => Flag::Ready { from: self.turned(turn, from), lane },
            Flag::Taken { by, lane } => Flag::Taken { by: self.turned(turn, by), lane },
            Flag::Arrived { cell, lane } => {
                Flag::Arrived { cell: self.turned_cell(turn, cell), lane }
            }
            Flag::Go { .. } | Flag::Sent { .. } => flag,
        }
    }

    pub(super) fn turned_step(&self, turn: Turn, step: Step) -> Step {
        let (to, of) = (|rank| self.turned(turn, rank), |cell| self.turned_cell(turn, cell));
        match step {
            Step::Put { peer, cell, from } => Step::Put { peer: to(peer), cell: of(cell), from },
            Step::Get { peer, cell, from } => Step::Get { peer: to(peer), cell: of(cell), from },
            Step::Signal { peer, flag } => {
                Step::Signal { peer: to(peer), flag: self.turned_flag(turn, flag) }
            }
            Step::Wait { flag } => Step::Wait { flag: self.turned_flag(turn, flag) },
        }
    }

    /// Returns the plan of `rank`, computed from the plan of its representative.
    #[cfg(test)]
    pub(super) fn turned_plan(&self, representative: &Plan, rank: Rank) -> Plan {
        let turn = self.turn_of(rank);
        let mut plan = Plan { rank, ..representative.clone() };
        for step in plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
            *step = self.turned_step(turn, *step);
        }
        plan
    }

    /// Returns whether `plan` is the rotated plan of its representative.
    pub(super) fn matches(&self, representative: &Plan, plan: &Plan) -> bool {
        let turn = self.turn_of(plan.rank);
        let Plan { collective, algorithm, rank: _, ranks, chunks, in_place, .. } = plan;
        let Plan { outputs, flags, lanes, .. } = plan;
        let agrees = *collective == representative.collective
            && *algorithm == representative.algorithm
            && *ranks == representative.ranks
            && *chunks == representative.chunks
            && *in_place == representative.in_place
            && *outputs == representative.outputs
            && *flags == representative.flags
            && lanes.len() == representative.lanes.len();
        agrees
            && lanes.iter().zip(&representative.lanes).all(|(lane, other)| {
                let turned = || other.steps.iter().map(|&step| self.turned_step(turn, step));
                lane.tier == other.tier && lane.steps.iter().copied().eq(turned())
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_go_round_and_back() {
        let interleaved: Vec<u32> = (0..12).map(|rank| rank % 3).collect();
        for nodes in [vec![0; 5], vec![0, 0, 1, 1, 2, 2], interleaved, vec![0]] {
            let topology = Topology::of_nodes(&nodes).unwrap();
            let none = Symmetry::none(topology.ranks());
            for symmetry in Symmetry::candidates(&topology, false).into_iter().chain([none]) {
                let representatives = symmetry.representatives();
                assert_eq!(representatives.len() * symmetry.orbit(), topology.ranks());
                for rank in Rank::all(topology.ranks()) {
                    let standing = representatives[symmetry.number(rank)];
                    assert_eq!(symmetry.turned(symmetry.turn_of(rank), standing), rank);
                    assert_eq!(symmetry.turned(symmetry.turn_back(rank), rank), standing);
                }
            }
        }
    }

    #[test]
    fn uneven_nodes_have_only_the_circle() {
        let topology = Topology::of_nodes(&[0, 0, 1]).unwrap();
        assert_eq!(Symmetry::candidates(&topology, false).len(), 1);
    }
}
