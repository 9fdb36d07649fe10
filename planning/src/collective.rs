//! Defines each collective operation by the blocks that every rank must hold at its end.
//!
//! A collective states what must be true at the end of a start, and not how data moves. The
//! [schedules](crate::schedule), the [verifier](crate::verify), the [layout](crate::layout), the
//! simulator and the cost model depend only on this statement.
//!
//! Every output consists of blocks, one for each rank that provides data. A plan names a block by
//! the rank that provides it. In an all-to-all, each rank provides a different block for every
//! output, so the output that holds a block is part of its name.
//!
//! In a reduction, a block of an output is the sum, or another operator, of contributions of ranks.
//! The rank that adds them provides the block, and the collective states whose contributions it
//! adds and in which order.
//!
//! To add a collective, add a variant here and answer what the compiler then asks for.

use std::fmt;
use std::ops::Range;

use peerlane_hal::Rank;
use serde::{Deserialize, Serialize};

/// A collective operation such as all-gather, defined by the blocks that each rank must hold at its
/// end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(not(peerlane_workspace), non_exhaustive)]
pub enum Collective {
    /// Every rank gets the block of every rank (`MPI_Allgather`, `ncclAllGather`).
    #[default]
    AllGather,
    /// Every rank gets the block of one rank, the root (`MPI_Bcast`, `ncclBroadcast`).
    Broadcast {
        /// The rank that provides the block.
        #[serde(with = "RankNumber")]
        root: Rank,
    },
    /// Every rank gets a different block from every rank (`MPI_Alltoall`).
    AllToAll,
    /// One rank, the root, gets the block of every rank (`MPI_Gather`).
    Gather {
        /// The rank that receives the blocks.
        #[serde(with = "RankNumber")]
        root: Rank,
    },
    /// Every rank gets a different block from one rank, the root (`MPI_Scatter`).
    Scatter {
        /// The rank that provides the blocks.
        #[serde(with = "RankNumber")]
        root: Rank,
    },
    /// Every rank gets one block of the sum of the inputs of all ranks (`MPI_Reduce_scatter_block`,
    /// `ncclReduceScatter`).
    ReduceScatter,
    /// Every rank gets the sum of the inputs of all ranks (`MPI_Allreduce`, `ncclAllReduce`).
    AllReduce,
    /// One rank, the root, gets the sum of the inputs of all ranks (`MPI_Reduce`, `ncclReduce`).
    Reduce {
        /// The rank that receives the sum.
        #[serde(with = "RankNumber")]
        root: Rank,
    },
    /// Every rank gets the sum of the inputs of the ranks up to its own (`MPI_Scan`).
    Scan,
    /// Every rank except rank 0 gets the sum of the inputs of the ranks below its own
    /// (`MPI_Exscan`).
    Exscan,
}

/// Selects the ranks that provide or receive blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    All,
    AllButFirst,
    Only(Rank),
}

impl Side {
    fn contains(self, rank: Rank) -> bool {
        match self {
            Self::All => true,
            Self::AllButFirst => rank != Rank(0),
            Self::Only(only) => rank == only,
        }
    }

    fn only(self) -> Option<Rank> {
        match self {
            Self::All | Self::AllButFirst => None,
            Self::Only(rank) => Some(rank),
        }
    }
}

impl Collective {
    /// All collectives, in the order of their declaration; those with a root have root 0.
    pub const ALL: &'static [Self] = &[
        Self::AllGather,
        Self::Broadcast { root: Rank(0) },
        Self::AllToAll,
        Self::Gather { root: Rank(0) },
        Self::Scatter { root: Rank(0) },
        Self::ReduceScatter,
        Self::AllReduce,
        Self::Reduce { root: Rank(0) },
        Self::Scan,
        Self::Exscan,
    ];

    /// Returns the name of the collective without its root.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll => "all-to-all",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::ReduceScatter => "reduce-scatter",
            Self::AllReduce => "all-reduce",
            Self::Reduce { .. } => "reduce",
            Self::Scan => "scan",
            Self::Exscan => "exscan",
        }
    }

    /// Returns a description of the collective in one sentence, without a full stop.
    pub const fn summary(self) -> &'static str {
        match self {
            Self::AllGather => "every rank gets the block of every rank",
            Self::Broadcast { .. } => "every rank gets the block of the root",
            Self::AllToAll => "every rank gets a different block from every rank",
            Self::Gather { .. } => "the root gets the block of every rank",
            Self::Scatter { .. } => "every rank gets a different block from the root",
            Self::ReduceScatter => "every rank gets one block of the sum of all inputs",
            Self::AllReduce => "every rank gets the sum of all inputs",
            Self::Reduce { .. } => "the root gets the sum of all inputs",
            Self::Scan => "every rank gets the sum of the inputs of the ranks up to its own",
            Self::Exscan => {
                "every rank except rank 0 gets the sum of the inputs of the ranks below its own"
            }
        }
    }

    /// Returns the collective with the name `name`, with root 0 if it has a root; `None` for other
    /// names.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|collective| collective.name() == name)
    }

    /// Returns the root of the collective, which the other ranks send to or receive from, if there
    /// is one.
    pub const fn root(self) -> Option<Rank> {
        match self {
            Self::Broadcast { root }
            | Self::Gather { root }
            | Self::Scatter { root }
            | Self::Reduce { root } => Some(root),
            Self::AllGather
            | Self::AllToAll
            | Self::ReduceScatter
            | Self::AllReduce
            | Self::Scan
            | Self::Exscan => None,
        }
    }

    /// Returns the collective with `root` as its root, or unchanged if it has no root.
    #[must_use]
    pub const fn with_root(self, root: Rank) -> Self {
        match self {
            Self::Broadcast { .. } => Self::Broadcast { root },
            Self::Gather { .. } => Self::Gather { root },
            Self::Scatter { .. } => Self::Scatter { root },
            Self::Reduce { .. } => Self::Reduce { root },
            Self::AllGather
            | Self::AllToAll
            | Self::ReduceScatter
            | Self::AllReduce
            | Self::Scan
            | Self::Exscan => self,
        }
    }

    /// Returns the preposition before the root in texts, such as `from` in `broadcast from 2`.
    pub(crate) const fn root_word(self) -> &'static str {
        match self.providers() {
            Side::Only(_) => "from",
            Side::All | Side::AllButFirst => "to",
        }
    }

    /// Returns the ranks that receive blocks, and therefore have outputs.
    const fn receivers(self) -> Side {
        match self {
            Self::AllGather
            | Self::Broadcast { .. }
            | Self::AllToAll
            | Self::Scatter { .. }
            | Self::ReduceScatter
            | Self::AllReduce
            | Self::Scan => Side::All,
            Self::Exscan => Side::AllButFirst,
            Self::Gather { root } | Self::Reduce { root } => Side::Only(root),
        }
    }

    /// Returns the ranks that provide blocks for outputs, and therefore have inputs.
    const fn providers(self) -> Side {
        match self {
            Self::AllGather
            | Self::AllToAll
            | Self::Gather { .. }
            | Self::ReduceScatter
            | Self::AllReduce
            | Self::Reduce { .. }
            | Self::Scan
            | Self::Exscan => Side::All,
            Self::Broadcast { root } | Self::Scatter { root } => Side::Only(root),
        }
    }

    /// Returns whether `rank` provides at least one block for an output, and therefore has an
    /// input.
    pub fn is_provider(self, rank: Rank) -> bool {
        self.providers().contains(rank)
    }

    /// Returns whether `rank` receives at least one block, and therefore has an output.
    pub fn is_receiver(self, rank: Rank) -> bool {
        self.receivers().contains(rank)
    }

    /// Returns whether the output of `receiver` must hold a block of `provider`.
    ///
    /// In a reduction, that is a block whose contributions `provider` has added.
    pub fn requires(self, provider: Rank, receiver: Rank) -> bool {
        // Where a loop calls it, the optimiser compares the root with the rank before it looks
        // whether there is a root. Valgrind reports that as a jump on an uninitialised value, in
        // `schedule/direct.rs` and in `verify`. Without a root, the code behind both ways of the
        // jump is the same.
        match (self.is_reduction(), self.has_equal_outputs()) {
            (false, _) => self.is_provider(provider) && self.is_receiver(receiver),
            (true, true) => self.reduces(provider) && self.is_receiver(receiver),
            (true, false) => provider == receiver && self.is_receiver(receiver),
        }
    }

    /// Returns whether the collective is a reduction, whose outputs are sums of contributions of
    /// ranks.
    pub const fn is_reduction(self) -> bool {
        match self {
            Self::ReduceScatter
            | Self::AllReduce
            | Self::Reduce { .. }
            | Self::Scan
            | Self::Exscan => true,
            Self::AllGather
            | Self::Broadcast { .. }
            | Self::AllToAll
            | Self::Gather { .. }
            | Self::Scatter { .. } => false,
        }
    }

    /// Returns whether `rank` adds contributions to a block of an output.
    pub fn reduces(self, rank: Rank) -> bool {
        self.is_reduction() && self.is_receiver(rank)
    }

    /// Returns the numbers of the ranks, of `ranks` ranks, whose contributions `adder` adds to its
    /// block.
    ///
    /// The range is empty if `adder` adds nothing.
    pub(crate) fn contributors(self, adder: Rank, ranks: u32) -> Range<u32> {
        if !self.reduces(adder) {
            return 0..0;
        }

        match self {
            Self::ReduceScatter | Self::AllReduce | Self::Reduce { .. } => 0..ranks,
            Self::Scan => 0..adder.0.saturating_add(1),
            Self::Exscan => 0..adder.0,
            Self::AllGather
            | Self::Broadcast { .. }
            | Self::AllToAll
            | Self::Gather { .. }
            | Self::Scatter { .. } => 0..0,
        }
    }

    /// Returns whether `adder` adds a contribution of rank `from` to its block.
    pub fn contributes(self, from: Rank, adder: Rank) -> bool {
        self.contributors(adder, u32::MAX).contains(&from.0)
    }

    /// Returns the ranks whose contributions `adder` adds to its block, in the order in which it
    /// adds them.
    ///
    /// The order decides how a sum of floating-point numbers is rounded. It is the order of ranks,
    /// except in place: there the output holds the rank's own contribution, which the first
    /// addition overwrites, so the own contribution comes first.
    pub fn additions(
        self,
        adder: Rank,
        ranks: u32,
        in_place: bool,
    ) -> impl Iterator<Item = Rank> + Clone {
        let contributors = self.contributors(adder, ranks);
        let first = (in_place && contributors.contains(&adder.0)).then_some(adder);
        let others = contributors.map(Rank).filter(move |from| Some(*from) != first);

        first.into_iter().chain(others)
    }

    /// Returns whether each rank contributes its whole input to every sum, instead of a part of it
    /// to each.
    pub fn contributes_whole_input(self) -> bool {
        match self {
            Self::Scan | Self::Exscan => true,
            Self::AllGather
            | Self::Broadcast { .. }
            | Self::AllToAll
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter
            | Self::AllReduce
            | Self::Reduce { .. } => false,
        }
    }

    /// Returns whether the input of a rank has a block for every output, instead of the same bytes
    /// for all.
    pub fn has_input_block_per_receiver(self) -> bool {
        !self.has_equal_outputs() && !self.contributes_whole_input()
    }

    /// Returns whether the output of a rank has a block of every rank, instead of only one block.
    ///
    /// The parts of which an all-reduce makes its result are not counted as blocks here.
    pub fn has_output_block_per_provider(self) -> bool {
        !self.is_reduction() && self.only_provider().is_none()
    }

    /// Returns whether each rank can have a block length of its own.
    ///
    /// In an all-to-all only each pair of ranks can, and in a scan all inputs are added element by
    /// element.
    pub fn lengths_may_differ(self) -> bool {
        !self.has_block_per_pair() && !self.contributes_whole_input()
    }

    /// Returns whether some output holds a block of `rank`.
    ///
    /// The lengths of other blocks have no effect.
    pub(crate) fn has_block_of(self, rank: Rank) -> bool {
        match self.is_reduction() {
            true => self.reduces(rank),
            false => !self.has_equal_outputs() || self.is_provider(rank),
        }
    }

    /// Returns whether all outputs together have a block of only one rank, the root.
    ///
    /// In a reduce, it is the only rank that adds.
    pub(crate) fn has_one_block(self) -> bool {
        match self.is_reduction() {
            true => self.only_receiver().is_some(),
            false => self.only_provider().is_some(),
        }
    }

    /// Returns the rank that provides all blocks, or `None` if several ranks do.
    pub fn only_provider(self) -> Option<Rank> {
        self.providers().only()
    }

    /// Returns the rank that receives all blocks, or `None` if several ranks do.
    pub fn only_receiver(self) -> Option<Rank> {
        self.receivers().only()
    }

    /// Returns the only rank that sends or receives all data, if other ranks cannot forward the
    /// data.
    pub(crate) fn only_end(self) -> Option<Rank> {
        match (self.only_provider(), self.only_receiver()) {
            (Some(_), _) if self.has_equal_outputs() => None,
            (only, other) => only.or(other),
        }
    }

    /// Returns whether every rank provides a different block for every rank, as in an all-to-all.
    pub fn has_block_per_pair(self) -> bool {
        self == Self::AllToAll
    }

    /// Returns whether all outputs need the same block of each rank, so that ranks can forward
    /// received blocks.
    pub fn has_equal_outputs(self) -> bool {
        match self {
            Self::AllGather
            | Self::Broadcast { .. }
            | Self::Gather { .. }
            | Self::AllReduce
            | Self::Reduce { .. } => true,
            Self::AllToAll
            | Self::Scatter { .. }
            | Self::ReduceScatter
            | Self::Scan
            | Self::Exscan => false,
        }
    }

    /// Returns whether every rank has an output, and all outputs hold the same blocks.
    pub fn all_ranks_get_the_same(self) -> bool {
        self.has_equal_outputs() && self.only_receiver().is_none()
    }

    /// Returns whether the operation cannot complete on any rank before all other ranks have
    /// entered it, because the output of every rank depends on the input of every rank.
    ///
    /// Schedules need fewer flags then. The verifier does not rely on this answer.
    pub(crate) fn everyone_hears_from_everyone(self) -> bool {
        match self {
            Self::AllGather | Self::AllToAll | Self::ReduceScatter | Self::AllReduce => true,
            Self::Broadcast { .. }
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::Reduce { .. }
            | Self::Scan
            | Self::Exscan => false,
        }
    }

    /// Returns whether the collective can run in place, with a rank's input already in its output.
    ///
    /// The input is the rank's own block there, or in an all-reduce the whole output.
    pub fn runs_in_place(self) -> bool {
        match self {
            Self::AllGather | Self::Broadcast { .. } | Self::AllReduce => true,
            Self::AllToAll
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter
            | Self::Reduce { .. }
            | Self::Scan
            | Self::Exscan => false,
        }
    }

    /// Returns the name of the collective with its article, such as `an all-gather`.
    pub fn with_article(self) -> String {
        let name = self.name();
        let article = if name.starts_with(['a', 'e']) { "an" } else { "a" };
        format!("{article} {name}")
    }

    /// Returns the factor from algorithm bandwidth to bus bandwidth, as nccl-tests defines it.
    ///
    /// Algorithm bandwidth is the bytes of one output by the time of a start. Bus bandwidth can be
    /// compared with the rate of a link.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        match self {
            Self::AllGather
            | Self::AllToAll
            | Self::Gather { .. }
            | Self::Scatter { .. }
            | Self::ReduceScatter => (ranks - 1) as f64 / ranks as f64,
            Self::AllReduce => 2.0 * (ranks - 1) as f64 / ranks as f64,
            Self::Broadcast { .. } | Self::Reduce { .. } | Self::Scan | Self::Exscan => 1.0,
        }
    }

    #[doc(hidden)]
    pub fn check(self, ranks: usize, in_place: bool) -> Result<(), String> {
        if let Some(root) = self.root().filter(|root| root.index() >= ranks) {
            return Err(format!("root is {root}, expected a rank below {ranks}"));
        }

        if in_place && !self.runs_in_place() {
            let what = self.with_article();
            return Err(format!("in_place is true, expected false: {what} cannot run in place"));
        }

        Ok(())
    }
}

/// Writes the name of the collective, and the root if there is one, such as `broadcast from 2`.
impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.root(), self.root_word()) {
            (Some(root), word) => write!(f, "{} {word} {root}", self.name()),
            (None, _) => f.pad(self.name()),
        }
    }
}

/// Serializes a [`Rank`] as its number, because `peerlane-hal` does not depend on serde.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Rank")]
pub(crate) struct RankNumber(u32);

#[cfg(test)]
mod tests {
    use super::*;

    fn goals(ranks: u32) -> impl Iterator<Item = Collective> {
        Collective::ALL.iter().flat_map(move |one| {
            let roots = if one.root().is_some() { ranks } else { 1 };
            (0..roots).map(move |root| one.with_root(Rank(root)))
        })
    }

    /// A collective that is not in the list cannot be named in a plan or on a command line.
    #[test]
    fn every_collective_is_listed_once() {
        let number = |one: &Collective| match one {
            Collective::AllGather => 0,
            Collective::Broadcast { .. } => 1,
            Collective::AllToAll => 2,
            Collective::Gather { .. } => 3,
            Collective::Scatter { .. } => 4,
            Collective::ReduceScatter => 5,
            Collective::AllReduce => 6,
            Collective::Reduce { .. } => 7,
            Collective::Scan => 8,
            Collective::Exscan => 9,
        };
        let numbers: Vec<usize> = Collective::ALL.iter().map(number).collect();
        assert_eq!(numbers, (0..10).collect::<Vec<_>>());
    }

    #[test]
    fn everyone_hears_from_everyone_if_all_outputs_depend_on_all_inputs() {
        let depends = |goal: Collective, rank: Rank, other: Rank| match goal.is_reduction() {
            false => goal.requires(other, rank),
            true => (0..4)
                .map(Rank)
                .any(|adder| goal.requires(adder, rank) && goal.contributes(other, adder)),
        };
        for goal in goals(4) {
            let pairs = (0..4).flat_map(|rank| (0..4).map(move |other| (Rank(rank), Rank(other))));
            let expected = pairs.clone().all(|(rank, other)| depends(goal, rank, other));
            assert_eq!(goal.everyone_hears_from_everyone(), expected, "{goal}");
        }
    }

    #[test]
    fn additions_are_in_the_order_of_ranks() {
        let order = |goal: Collective, adder, in_place| -> Vec<u32> {
            goal.additions(Rank(adder), 4, in_place).map(|rank| rank.0).collect()
        };
        let none: [u32; 0] = [];
        assert_eq!(order(Collective::AllReduce, 2, false), [0, 1, 2, 3]);
        assert_eq!(order(Collective::AllReduce, 2, true), [2, 0, 1, 3]);
        assert_eq!(order(Collective::Reduce { root: Rank(1) }, 2, false), none);
        assert_eq!(order(Collective::Scan, 2, false), [0, 1, 2]);
        assert_eq!(order(Collective::Exscan, 2, false), [0, 1]);
        assert_eq!(order(Collective::Exscan, 0, false), none);
        assert_eq!(order(Collective::AllGather, 2, false), none);
    }

    #[test]
    fn bus_bandwidth_is_that_of_nccl_tests() {
        let factors = Collective::ALL.iter().map(|goal| goal.bus_factor(4)).collect::<Vec<_>>();
        assert_eq!(factors, [0.75, 1.0, 0.75, 0.75, 0.75, 0.75, 1.5, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn impossible_goals_are_named() {
        let root = Collective::Broadcast { root: Rank(3) };
        assert_eq!(root.check(3, false).unwrap_err(), "root is 3, expected a rank below 3");
        assert_eq!(root.check(4, true), Ok(()));
        let text = "in_place is true, expected false: an all-to-all cannot run in place";
        assert_eq!(Collective::AllToAll.check(4, true).unwrap_err(), text);
    }
}
