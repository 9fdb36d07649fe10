//! What a lane knows: a set of facts, as bits.

use peerlane_hal::Rank;

use super::flags::Flags;
use super::program::Program;
use crate::plan::Cell;

/// How many starts ago; 0 is the present one.
pub(super) type Age = u32;

/// Something that has happened, in the present start unless it has an age.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fact {
    /// The caller of a rank has handed over its input and output, and has done with the output of
    /// the start before.
    Entered(Rank, Age),
    /// A cell is there in a rank's output.
    Written(Rank, Cell),
    /// The sources of a lane may be reused.
    Done(usize),
    /// A lane has got all that it gets from a rank: the number of the pair.
    Taken(usize),
    /// The wait for a flag has passed.
    Consumed(usize, Age),
}

/// Numbers all facts of a program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Domain {
    ranks: usize,
    parts: usize,
    lanes: usize,
    takings: usize,
    flags: usize,
    /// Ages up to this one are remembered.
    age_max: Age,
}

impl Domain {
    pub(super) fn new(program: &Program, flags: &Flags, takings: usize) -> Self {
        Self {
            ranks: program.ranks as usize,
            parts: program.parts as usize,
            lanes: program.lanes.len(),
            takings,
            flags: flags.len(),
            age_max: program.outputs,
        }
    }

    /// A set without facts.
    pub(super) fn nothing(&self) -> Facts {
        let facts = self.first_consumed() + self.flags * self.ages();
        Facts { words: vec![0; facts.div_ceil(WORD_BITS)] }
    }

    /// What is left of `known` when the next start begins.
    pub(super) fn next_start(&self, known: &Facts) -> Facts {
        let mut kept = self.nothing();
        let mut keep = |fact: &dyn Fn(Age) -> Fact, age| {
            if known.has(self.index(fact(age))) {
                kept.insert(self.index(fact(age + 1)));
            }
        };
        for age in 0..self.age_max {
            Rank::all(self.ranks).for_each(|rank| keep(&|age| Fact::Entered(rank, age), age));
            (0..self.flags).for_each(|flag| keep(&|age| Fact::Consumed(flag, age), age));
        }
        kept
    }

    /// The number of a fact.
    pub(super) fn index(&self, fact: Fact) -> usize {
        match fact {
            Fact::Entered(rank, age) => age as usize * self.ranks + rank.index(),
            Fact::Written(rank, Cell { shard, part }) => {
                let shard = rank.index() * self.ranks + shard.index();
                self.first_written() + shard * self.parts + part as usize
            }
            Fact::Done(lane) => self.first_done() + lane,
            Fact::Taken(taking) => self.first_taken() + taking,
            Fact::Consumed(flag, age) => self.first_consumed() + age as usize * self.flags + flag,
        }
    }

    fn ages(&self) -> usize {
        self.age_max as usize + 1
    }

    fn first_written(&self) -> usize {
        self.ranks * self.ages()
    }

    fn first_done(&self) -> usize {
        self.first_written() + self.ranks * self.ranks * self.parts
    }

    fn first_taken(&self) -> usize {
        self.first_done() + self.lanes
    }

    fn first_consumed(&self) -> usize {
        self.first_taken() + self.takings
    }
}

const WORD_BITS: usize = u64::BITS as usize;

/// A set of facts, by number.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    words: Vec<u64>,
}

impl Facts {
    pub(super) fn has(&self, index: usize) -> bool {
        self.words[index / WORD_BITS] & (1 << (index % WORD_BITS)) != 0
    }

    pub(super) fn insert(&mut self, index: usize) {
        self.words[index / WORD_BITS] |= 1 << (index % WORD_BITS);
    }

    pub(super) fn extend(&mut self, other: &Self) {
        for (word, other) in self.words.iter_mut().zip(&other.words) {
            *word |= other;
        }
    }
}
