//! Finds rotations of the ranks that leave a set of plans unchanged, so that few plans represent
//! all.
//!
//! Ranks form a grid, and a rotation shifts its rows and columns cyclically. If every plan is the
//! rotated plan of one rank of its orbit, then whatever holds for that rank holds for the whole
//! orbit.

use peerlane_hal::Rank;

use crate::plan::{Cell, Flag, Plan, Step};
use crate::topology::Topology;

/// A cyclic shift of the rows and the columns of a grid of ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Rotation {
    rows: u32,
    columns: u32,
}

/// Arranges ranks in a grid whose rotations map the plan of one rank to those of others.
#[derive(Clone, Debug)]
pub(super) struct Symmetry {
    /// The ranks, row by row.
    grid: Vec<Rank>,
    /// The row and the column of each rank.
    positions: Vec<(u32, u32)>,
    rows: u32,
    columns: u32,
    /// Whether rotations shift rows, and whether they shift columns.
    shifts: (bool, bool),
}

impl Symmetry {
    pub(super) fn none(ranks: usize) -> Self {
        Self::new(Rank::all(ranks).collect(), 1, (false, false))
    }

    /// Returns the symmetries that plans for `topology` can have, those with the fewest orbits
    /// first.
    ///
    /// With `keeps_nodes`, ranks of one node stay on one node.
    pub(super) fn candidates(topology: &Topology, keeps_nodes: bool) -> Vec<Self> {
        let mut candidates = Vec::new();
        // A rotation of all ranks moves ranks to other nodes, unless there is only one node.
        if !keeps_nodes || topology.nodes() == 1 {
            let grid = Rank::all(topology.ranks()).collect();
            candidates.push(Self::new(grid, 1, (true, false)));
        }

        // A grid has a row for each node, so all nodes need the same number of ranks.
        let nodes = || (0u32..).take(topology.nodes());
        let columns = topology.members(0).len();
        let is_even = nodes().all(|node| topology.members(node).len() == columns);
        if is_even && topology.nodes() > 1 {
            let grid: Vec<Rank> =
                nodes().flat_map(|node| topology.members(node)).copied().collect();
            candidates.push(Self::new(grid.clone(), columns, (true, true)));
            candidates.push(Self::new(grid, columns, (true, false)));
        }

        candidates
    }

    fn new(grid: Vec<Rank>, columns: usize, shifts: (bool, bool)) -> Self {
        let rows = Rank::at(grid.len() / columns).0;
        let columns = Rank::at(columns).0;

        let mut positions = vec![(0, 0); grid.len()];
        for (index, rank) in (0u32..).zip(&grid) {
            positions[rank.index()] = (index / columns, index % columns);
        }

        Self { grid, positions, rows, columns, shifts }
    }

    pub(super) fn ranks(&self) -> usize {
        self.grid.len()
    }

    /// Returns one rank of each orbit, that is, of each set of ranks that rotations map to each
    /// other.
    ///
    /// The ranks are in the order of the grid.
    pub(super) fn representatives(&self) -> Vec<Rank> {
        self.grid
            .iter()
            .copied()
            .filter(|&rank| self.rotation_of(rank) == Rotation::default())
            .collect()
    }

    /// Returns the number of ranks in each orbit, that is, in each set of ranks that rotations map
    /// to each other.
    pub(super) fn orbit(&self) -> usize {
        let positions = |shifts, count| if shifts { count as usize } else { 1 };
        positions(self.shifts.0, self.rows) * positions(self.shifts.1, self.columns)
    }

    /// Returns the index in [`representatives`](Self::representatives) of the rank that represents
    /// `rank`.
    pub(super) fn representative_index(&self, rank: Rank) -> usize {
        let (grid_row, grid_column) = self.positions[rank.index()];
        let row = if self.shifts.0 { 0 } else { grid_row };
        let column = if self.shifts.1 { 0 } else { grid_column };

        // Only whole rows and whole columns are represented by others, so the indices have no gap.
        let columns = if self.shifts.1 { 1 } else { self.columns };
        row as usize * columns as usize + column as usize
    }

    /// Returns the rotation of the grid of ranks that moves the representative of `rank`, whose
    /// plan stands for the plan of `rank`, to `rank`.
    pub(super) fn rotation_of(&self, rank: Rank) -> Rotation {
        let (row, column) = self.positions[rank.index()];
        Rotation {
            rows: if self.shifts.0 { row } else { 0 },
            columns: if self.shifts.1 { column } else { 0 },
        }
    }

    /// Returns the rotation of the grid of ranks that moves `rank` to its representative, whose
    /// plan stands for the plan of `rank`.
    pub(super) fn rotation_back(&self, rank: Rank) -> Rotation {
        let Rotation { rows, columns } = self.rotation_of(rank);
        let back = |by, count| if by == 0 { 0 } else { count - by };
        Rotation { rows: back(rows, self.rows), columns: back(columns, self.columns) }
    }

    /// Returns the rank at the position in the grid to which `rotation` moves `rank`.
    pub(super) fn rotated(&self, rotation: Rotation, rank: Rank) -> Rank {
        if rotation == Rotation::default() {
            return rank;
        }

        // The sum is computed only if it is below `count`, so it cannot overflow.
        let shifted = |at: u32, by: u32, count: u32| {
            if at >= count - by { at - (count - by) } else { at + by }
        };

        let (old_row, old_column) = self.positions[rank.index()];
        let row = shifted(old_row, rotation.rows, self.rows);
        let column = shifted(old_column, rotation.columns, self.columns);
        self.grid[(row * self.columns + column) as usize]
    }

    pub(super) fn rotated_cell(&self, rotation: Rotation, cell: Cell) -> Cell {
        Cell { block: self.rotated(rotation, cell.block), chunk: cell.chunk }
    }

    /// Returns `flag` with each rank in it replaced by the rank to which `rotation` moves it.
    pub(super) fn rotated_flag(&self, rotation: Rotation, flag: Flag) -> Flag {
        match flag {
            Flag::Ready { from, lane } => Flag::Ready { from: self.rotated(rotation, from), lane },
            Flag::Free { from, lane } => Flag::Free { from: self.rotated(rotation, from), lane },
            Flag::Taken { by, lane } => Flag::Taken { by: self.rotated(rotation, by), lane },
            Flag::Arrived { cell, lane } => {
                Flag::Arrived { cell: self.rotated_cell(rotation, cell), lane }
            }
            Flag::Contributed { cell, lane } => {
                Flag::Contributed { cell: self.rotated_cell(rotation, cell), lane }
            }
            // These flags connect lanes of one rank, and contain no rank.
            Flag::Go { .. } | Flag::Sent { .. } => flag,
        }
    }

    /// Returns `step` with each rank in it replaced by the rank to which `rotation` moves it.
    pub(super) fn rotated_step(&self, rotation: Rotation, step: Step) -> Step {
        let rank_of = |rank| self.rotated(rotation, rank);
        let cell_of = |cell| self.rotated_cell(rotation, cell);

        match step {
            Step::Put { peer, cell, from } => {
                Step::Put { peer: rank_of(peer), cell: cell_of(cell), from }
            }
            Step::Get { peer, cell, from } => {
                Step::Get { peer: rank_of(peer), cell: cell_of(cell), from }
            }
            Step::Reduce { cell, from } => {
                Step::Reduce { cell: cell_of(cell), from: rank_of(from) }
            }
            Step::Signal { peer, flag } => {
                Step::Signal { peer: rank_of(peer), flag: self.rotated_flag(rotation, flag) }
            }
            Step::Wait { flag } => Step::Wait { flag: self.rotated_flag(rotation, flag) },
        }
    }

    #[cfg(test)]
    pub(super) fn rotated_plan(&self, representative: &Plan, rank: Rank) -> Plan {
        let rotation = self.rotation_of(rank);
        let mut plan = Plan { rank, ..representative.clone() };
        for step in plan.lanes.iter_mut().flat_map(|lane| &mut lane.steps) {
            *step = self.rotated_step(rotation, *step);
        }
        plan
    }

    /// Returns whether the collective requires of `rank` what it requires of the rank of
    /// `representative`, after the rotation that moves that rank to `rank`.
    ///
    /// Otherwise plans can be rotated plans of each other although only one of them is right.
    pub(super) fn keeps_goal(&self, representative: &Plan, rank: Rank) -> bool {
        let &Plan { collective, rank: followed, ranks, in_place, .. } = representative;
        let rotation = self.rotation_of(rank);
        let rotated = |other| self.rotated(rotation, other);

        let blocks_match = (0..ranks).map(Rank).all(|block| {
            collective.requires(block, followed) == collective.requires(rotated(block), rank)
        });
        let order = collective.additions(followed, ranks, in_place);
        blocks_match && order.map(rotated).eq(collective.additions(rank, ranks, in_place))
    }

    /// Returns whether `plan` equals the plan `representative` after the rotation that moves the
    /// rank of `representative` to the rank of `plan`.
    pub(super) fn matches(&self, representative: &Plan, plan: &Plan) -> bool {
        // The pattern has every field of a plan, so that a new field is not forgotten here.
        let Plan {
            collective,
            algorithm,
            rank: _,
            ranks,
            chunks,
            in_place,
            outputs,
            inboxes,
            flags,
            lanes,
        } = plan;
        let agrees = *collective == representative.collective
            && *algorithm == representative.algorithm
            && *ranks == representative.ranks
            && *chunks == representative.chunks
            && *in_place == representative.in_place
            && *outputs == representative.outputs
            && *inboxes == representative.inboxes
            && *flags == representative.flags
            && lanes.len() == representative.lanes.len();
        if !agrees {
            return false;
        }

        let rotation = self.rotation_of(plan.rank);
        lanes.iter().zip(&representative.lanes).all(|(lane, other)| {
            let rotated = other.steps.iter().map(|&step| self.rotated_step(rotation, step));
            lane.tier == other.tier && lane.steps.iter().copied().eq(rotated)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotations_lead_to_every_rank_and_back() {
        let interleaved: Vec<u32> = (0..12).map(|rank| rank % 3).collect();
        for nodes in [vec![0; 5], vec![0, 0, 1, 1, 2, 2], interleaved, vec![0]] {
            let topology = Topology::of_nodes(&nodes).unwrap();
            let none = Symmetry::none(topology.ranks());
            for symmetry in Symmetry::candidates(&topology, false).into_iter().chain([none]) {
                let representatives = symmetry.representatives();
                assert_eq!(representatives.len() * symmetry.orbit(), topology.ranks());
                for rank in Rank::all(topology.ranks()) {
                    let representative = representatives[symmetry.representative_index(rank)];
                    assert_eq!(symmetry.rotated(symmetry.rotation_of(rank), representative), rank);
                    assert_eq!(
                        symmetry.rotated(symmetry.rotation_back(rank), rank),
                        representative
                    );
                }
            }
        }
    }

    #[test]
    fn uneven_nodes_have_only_the_rotation_of_all_ranks() {
        let topology = Topology::of_nodes(&[0, 0, 1]).unwrap();
        assert_eq!(Symmetry::candidates(&topology, false).len(), 1);
    }
}
