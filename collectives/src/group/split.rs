//! Splits groups into smaller ones, which use the fabrics, the heap, the bootstrap and the threads
//! of the first group.

use std::collections::BTreeSet;

use peerlane_hal::{Deadline, ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use super::agreement::{Offer, agree, decode, encode};
use super::engines::check_engine;
use super::heap::Dropped;
use super::identity::Identity;
use super::options::{PartOptions, check_timeout};
use super::runtime::Runtime;
use super::{Group, GroupOptions, Setup};
use crate::bootstrap::message::RankList;
use crate::error::Error;
use crate::topology::Topology;

/// What a rank tells the others when a group is split.
#[derive(Serialize, Deserialize)]
struct Wish {
    part: Part,
    options: PartOptions,
    /// A number that this rank has given to no other subgroup.
    number: u32,
    /// The allocations of the heap that this rank has dropped.
    dropped: Vec<Dropped>,
}

/// The part of a group that a rank wants to be in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Part {
    None,
    Color { color: u32, key: i64 },
    Ranks(Vec<u32>),
}

impl Group {
    /// Splits the group: ranks with the same `color` form a new group, ordered by `key` and then by
    /// rank. Collective.
    ///
    /// Every rank of the group calls it. A rank without a color gets no group. The new group uses
    /// the fabrics, the bootstrap, the threads and the heap of this one, so it needs no thread and
    /// no descriptor of its own until its operations need more than 64 KiB of memory. It has this
    /// group's timeout and strictness; [`split_with`](Self::split_with) sets others, and a
    /// [label](GroupOptions::label).
    ///
    /// Each group ends by itself: a lost rank ends the groups that hold it, and the others go on.
    /// All groups end when the group from which they were split is closed or dropped. Waiting for
    /// an operation of one group also moves those of the others.
    ///
    /// ```
    /// use peerlane::bootstrap::{Bootstrap, in_process};
    /// use peerlane::{Group, host};
    ///
    /// // Ranks 0 and 1 share a model, and so do ranks 2 and 3.
    /// in_process::run(4, |bootstrap| {
    ///     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    ///     let mut world = Group::open(bootstrap, fabric)?;
    ///     let rank = world.rank().0;
    ///     let mut tensor = world.split(Some(rank / 2), 0)?.expect("every rank has a color");
    ///     let mut gather = tensor.all_gather::<u32>(1).prepare()?;
    ///     gather.input_mut()?[0] = rank;
    ///     gather.run()?;
    ///     assert_eq!(gather.output()?, [rank / 2 * 2, rank / 2 * 2 + 1]);
    ///     tensor.close()?;
    ///     world.close()
    /// })
    /// .unwrap();
    /// ```
    ///
    /// # Errors
    /// The reason why the group has ended; [`Mismatch`](ErrorKind::Mismatch) if ranks of a new
    /// group have different options, or call something else; [`PeerLost`](ErrorKind::PeerLost) and
    /// [`Timeout`](ErrorKind::Timeout), naming the rank; [`Unavailable`](ErrorKind::Unavailable) if
    /// the [bootstrap](crate::bootstrap::Bootstrap::subgroup) cannot split a group.
    pub fn split(&mut self, color: Option<u32>, key: i64) -> Result<Option<Self>, Error> {
        self.split_with(self.split_options(), color, key)
    }

    /// Splits the group with options for the new group: its timeout, strictness and heap.
    /// Collective.
    ///
    /// # Errors
    /// As [`split`](Self::split); [`InvalidArgument`](ErrorKind::InvalidArgument) for a zero
    /// timeout, and if links or a topology are set, because these are the group's.
    pub fn split_with(
        &mut self,
        options: GroupOptions,
        color: Option<u32>,
        key: i64,
    ) -> Result<Option<Self>, Error> {
        self.divide(options, color.map_or(Part::None, |color| Part::Color { color, key }))
    }

    /// Splits the group by lists of ranks: those of one list form a new group, in the order of the
    /// list. Collective.
    ///
    /// Every rank of the group calls it, with the list that holds this rank.
    ///
    /// # Errors
    /// As [`split`](Self::split); [`InvalidArgument`](ErrorKind::InvalidArgument) if `ranks` does
    /// not hold this rank, names a rank twice or one that does not exist;
    /// [`Mismatch`](ErrorKind::Mismatch) if a rank of the list has another list.
    pub fn subgroup(&mut self, ranks: &[Rank]) -> Result<Self, Error> {
        let options = self.split_options();
        let ranks = ranks.iter().map(|rank| rank.0).collect();
        Ok(self.divide(options, Part::Ranks(ranks))?.expect("a list holds its own rank"))
    }

    /// Returns the options of a group that [`split`](Self::split) opens, which are those of this
    /// one.
    pub fn split_options(&self) -> GroupOptions {
        let options = GroupOptions::default().timeout(self.timeout()).strict(self.setup.strict);
        let options = options.inherited_engine(self.setup.engine.clone());
        options.beside_compute(self.setup.beside_compute)
    }

    fn divide(&mut self, options: GroupOptions, part: Part) -> Result<Option<Self>, Error> {
        self.runtime.life.check()?;
        // It counts when the ranks have agreed. A rank that refuses the call does not know which
        // count would change.
        let number = self.splits + 1;
        let (name, deadline) = (format!("split {number}"), Deadline::after(self.timeout()));
        // Subgroups get blocks for flags in the pools that the group has.
        if !self.heap.has_flags() {
            self.prepare_barrier()?;
        }

        let subgroup = self.runtime.driver.next_subgroup();
        let dropped = self.heap.dropped();
        let own_dropped = dropped.len();
        let label = options.own_label();
        let color = match part {
            Part::Color { color, .. } => format!(", color {color}"),
            Part::None | Part::Ranks(_) => String::new(),
        };
        let wish = self.wish(options, part, subgroup, dropped);
        let offer = wish.map(|wish| Offer::default().blob(encode(&wish)));
        let offers = agree(&self.runtime, &name, offer, deadline)?;
        self.splits = number;

        let wishes = Rank::all(offers.len()).zip(&offers);
        let wishes = wishes.map(|(peer, offer)| decode("part of the group", offer, peer, 0));
        let mut wishes: Vec<Wish> = wishes.collect::<Result<_, Error>>()?;
        check_wishes(&name, &wishes)?;
        let dropped = wishes.iter_mut().map(|wish| std::mem::take(&mut wish.dropped));
        self.heap.free_dropped(&dropped.collect::<Vec<_>>(), own_dropped);

        // The groups have no rank in common, so their blocks can be at the same place.
        let demands = self.heap.subgroup_demands();
        let (allocation, blocks) = self.take_blocks(&demands, deadline)?;

        let Some(members) = members(&wishes, self.rank()) else { return Ok(None) };
        let first = &wishes[members[0].index()];
        let life = &self.runtime.life;
        let bootstrap = life.bootstrap.subgroup(first.number, &members)?;
        let PartOptions { timeout, engine, strict, beside_compute, heap_bytes } =
            first.options.clone();
        let first_ranks = members.iter().map(|member| life.identity.first(*member));
        let first_ranks = first_ranks.collect();

        let label = label.or_else(|| {
            let parent = life.identity.label.as_ref().filter(|_| self.setup.is_split);
            let parent = parent.map_or(String::new(), |label| format!("{label}, "));
            Some(format!("{parent}{name}{color}"))
        });
        let identity = Identity { label, first_ranks, is_first: false };
        let membership = self.membership.clone();
        let runtime = Runtime::new(bootstrap, timeout, identity, membership.driver());
        if self.runtime.work.is_for_thread() {
            runtime.work.move_by_thread();
        }
        self.runtime.add_child(&runtime);

        let blocks = demands.iter().zip(blocks);
        let blocks = blocks.map(|(&(pool, bytes), block)| (pool, bytes, block.regroup(&members)));
        let heap = self.heap.of_subgroup(heap_bytes, allocation, blocks);
        let nodes = members.iter().map(|member| self.topology().node(*member));
        let topology = Topology::by_key(nodes)?;
        let setup = Setup {
            topology,
            engine,
            strict,
            beside_compute,
            is_split: true,
            ..self.setup.clone()
        };
        Ok(Some(Self::new(membership, setup, runtime, heap)))
    }

    fn wish(
        &self,
        options: GroupOptions,
        part: Part,
        number: u32,
        dropped: Vec<Dropped>,
    ) -> Result<Wish, Error> {
        let options = options.of_part()?;
        check_timeout(options.timeout)?;
        if let Some(engine) = &options.engine {
            check_engine(engine, &self.setup.engines)?;
        }
        if let Part::Ranks(ranks) = &part {
            self.check_list(ranks)?;
        }
        Ok(Wish { part, options, number, dropped })
    }

    fn check_list(&self, ranks: &[u32]) -> Result<(), Error> {
        let invalid = |text| Err(Error::new(ErrorKind::InvalidArgument, text));
        let (own, count) = (self.rank(), self.ranks());
        if let Some(rank) = ranks.iter().find(|rank| **rank as usize >= count) {
            return invalid(format!("ranks names rank {rank}, expected ranks below {count}"));
        }
        let mut seen = BTreeSet::new();
        if let Some(rank) = ranks.iter().find(|rank| !seen.insert(**rank)) {
            return invalid(format!("ranks names rank {rank} twice, expected each rank once"));
        }
        if !ranks.contains(&own.0) {
            return invalid(format!("ranks is {ranks:?}, expected a list with this rank, {own}"));
        }
        Ok(())
    }
}

/// Returns the ranks of the new group of `own`, in the order of the new group.
fn members(wishes: &[Wish], own: Rank) -> Option<Vec<Rank>> {
    match &wishes[own.index()].part {
        Part::None => None,
        Part::Ranks(ranks) => Some(ranks.iter().map(|rank| Rank(*rank)).collect()),
        Part::Color { color: own, .. } => {
            let key = |(rank, wish): (Rank, &Wish)| match wish.part {
                Part::Color { color, key } if color == *own => Some((key, rank)),
                _ => None,
            };
            let keys: BTreeSet<_> = Rank::all(wishes.len()).zip(wishes).filter_map(key).collect();
            Some(keys.into_iter().map(|(_, rank)| rank).collect())
        }
    }
}

/// Returns the same error on all ranks if those of a new group disagree about it.
fn check_wishes(name: &str, wishes: &[Wish]) -> Result<(), Error> {
    for (rank, wish) in Rank::all(wishes.len()).zip(wishes) {
        for member in members(wishes, rank).unwrap_or_default() {
            let other = &wishes[member.index()];
            let differs = match (&wish.part, &other.part) {
                (Part::Ranks(own), part) if wish.part != other.part => {
                    let other = match part {
                        Part::Ranks(ranks) => format!("wants one of {}", list(ranks)),
                        Part::Color { .. } | Part::None => "calls `split`".to_owned(),
                    };
                    format!("rank {rank} wants a group of {}, rank {member} {other}", list(own))
                }
                _ => match wish.options.difference(&other.options) {
                    Some((name, own, other)) => {
                        format!("{name} is {other} on rank {member}, {own} on rank {rank}")
                    }
                    None => continue,
                },
            };
            let text = format!("{name}: ranks disagree: {differs}");
            return Err(Error::new(ErrorKind::Mismatch, text).with_peer(member));
        }
    }

    Ok(())
}

fn list(ranks: &[u32]) -> String {
    RankList(&ranks.iter().map(|rank| Rank(*rank)).collect::<Vec<_>>()).to_string()
}
