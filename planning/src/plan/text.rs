//! Writes plans as text, one step per line, and reads them back.
//!
//! The text omits values that are the default: one output, one inbox, prompt flags, the tier of a
//! local lane, the rank in a signal of a rank's own `ready`, `free` or `taken`, and lane 0 as the
//! reader of a flag. Other values are written, so every plan can be read back, also an incorrect
//! one. Reading ignores blank lines and indentation. It checks only the form, not whether the plan
//! is correct.

use std::fmt;
use std::str::FromStr;

use peerlane_hal::{ErrorKind, Rank};

use super::algorithm;
use super::{Algorithm, Cell, Flag, FlagOrder, Lane, LaneId, Plan, Source, Step, Tier};
use crate::collective::Collective;
use crate::error::quoted;

/// Writes the text form of a plan, which [`FromStr`] reads back.
///
/// ```text
/// all-gather direct: rank 0 of 2, 1 chunk, out of place
/// lane 0
///   signal ready to 1
///   put 0.0 input to 0
///   wait ready from 1
///   put 0.0 input to 1
///   signal arrived 0.0 to 1
///   wait arrived 1.0
/// ```
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, algorithm, rank, ranks, chunks, in_place, .. } = self;
        let Self { outputs, inboxes, flags, lanes, .. } = self;

        let plural = if *chunks == 1 { "" } else { "s" };
        let place = if *in_place { "in place" } else { "out of place" };
        write!(
            f,
            "{collective} {algorithm}: rank {rank} of {ranks}, {chunks} chunk{plural}, {place}"
        )?;

        // Values that are the default are left out, and the parser fills them in.
        if *outputs != 1 {
            write!(f, ", {outputs} outputs in turn")?;
        }
        if *inboxes != 1 {
            write!(f, ", {inboxes} inboxes in turn")?;
        }
        if *flags != FlagOrder::Prompt {
            write!(f, ", flags {flags}")?;
        }
        writeln!(f)?;

        for (number, lane) in lanes.iter().enumerate() {
            match lane.tier {
                Tier::Local => writeln!(f, "lane {number}")?,
                tier @ Tier::Network => writeln!(f, "lane {number} {tier}")?,
            }
            for &step in &lane.steps {
                writeln!(f, "  {}", step.display_for(*rank))?;
            }
        }
        Ok(())
    }
}

/// Prints one step as a line in the text of a rank's plan.
#[derive(Clone, Copy, Debug)]
pub struct StepOf {
    rank: Rank,
    step: Step,
}

impl Step {
    /// Returns an object that prints the step as a line in the text of the plan of `rank`.
    pub fn display_for(self, rank: Rank) -> StepOf {
        StepOf { rank, step: self }
    }
}

impl fmt::Display for StepOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Step::Put { peer, cell, from } => write!(f, "put {cell} {from} to {peer}"),
            Step::Get { peer, cell, from } => write!(f, "get {cell} {from} of {peer}"),
            Step::Reduce { cell, from } => write!(f, "reduce {cell} of {from}"),

            // A rank usually signals its own flags, so their text leaves out the rank.
            Step::Signal { peer, flag: Flag::Taken { by, lane } } if by == self.rank => {
                write!(f, "signal taken{} to {peer}", For(lane))
            }
            Step::Signal { peer, flag: Flag::Ready { from, lane } } if from == self.rank => {
                write!(f, "signal ready{} to {peer}", For(lane))
            }
            Step::Signal { peer, flag: Flag::Free { from, lane } } if from == self.rank => {
                write!(f, "signal free{} to {peer}", For(lane))
            }
            Step::Signal { peer, flag } => write!(f, "signal {flag} to {peer}"),

            Step::Wait { flag } => write!(f, "wait {flag}"),
        }
    }
}

impl fmt::Display for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ready { from, lane } => write!(f, "ready{} from {from}", For(*lane)),
            Self::Free { from, lane } => write!(f, "free{} from {from}", For(*lane)),
            Self::Arrived { cell, lane } => write!(f, "arrived {cell}{}", For(*lane)),
            Self::Contributed { cell, lane } => write!(f, "contributed {cell}{}", For(*lane)),
            Self::Taken { by, lane } => write!(f, "taken{} by {by}", For(*lane)),
            Self::Go { lane } => write!(f, "go lane {lane}"),
            Self::Sent { lane } => write!(f, "sent lane {lane}"),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Input => "input",
            Self::Output => "output",
        })
    }
}

/// Prints the part of a flag's text that names the waiting lane: `for lane 2`, or nothing for
/// lane 0.
struct For(LaneId);

impl fmt::Display for For {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            LaneId::HOME => Ok(()),
            lane => write!(f, " for lane {lane}"),
        }
    }
}

/// Reports an invalid line in the text of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid plan, line {line} {}: expected {expected}, found {found}", quoted(.text))]
pub struct ParseError {
    /// The number of the invalid line, counted from 1.
    pub line: usize,
    /// The text of the invalid line, without white space at its ends.
    pub text: String,
    /// A description of the words that are valid in place of the invalid word.
    pub expected: String,
    /// The invalid word in quotes, or `the end of the line` if a word is missing.
    pub found: String,
}

impl peerlane_hal::Error for ParseError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidArgument
    }
}

impl FromStr for Plan {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut lines = (1..)
            .zip(text.lines())
            .map(|(number, text)| Line::new(number, text))
            .filter(|line| !line.words.is_empty());

        // A text without words is reported as a missing word in its first line.
        let mut plan = header(lines.next().unwrap_or_else(|| Line::new(1, "")))?;

        for mut line in lines {
            if line.words[0] == "lane" {
                line.literal("lane")?;
                // Lanes are numbered in order, so only this number is valid.
                line.literal(&plan.lanes.len().to_string())?;

                let tier = match line.peek() {
                    None => Tier::Local,
                    Some(_) => line.read("network", |word| {
                        (word == Tier::Network.name()).then_some(Tier::Network)
                    })?,
                };

                line.end()?;
                plan.lanes.push(Lane { tier, steps: Vec::new() });
            } else if let Some(lane) = plan.lanes.last_mut() {
                lane.steps.push(step(line, plan.rank)?);
            } else {
                return Err(line.fault(0, "lane 0"));
            }
        }

        Ok(plan)
    }
}

/// Parses the first line of a plan's text into a plan without lanes.
fn header(mut line: Line<'_>) -> Result<Plan, ParseError> {
    let collective = line.collective()?;
    let algorithm = line.read(&algorithm::known(), |word| word.parse::<Algorithm>().ok())?;
    line.literal(":")?;

    line.literal("rank")?;
    let rank = line.rank()?;
    line.literal("of")?;
    let ranks = line.read_number("the number of ranks")?;
    line.literal(",")?;

    let chunks = line.read_number("the number of chunks")?;
    line.literal(if chunks == 1 { "chunk" } else { "chunks" })?;
    line.literal(",")?;

    let in_place = line.read("in place or out of place", |word| match word {
        "in" => Some(true),
        "out" => Some(false),
        _ => None,
    })?;
    if !in_place {
        line.literal("of")?;
    }
    line.literal("place")?;

    // All parts that follow are optional, in this order: outputs, inboxes, flags.
    let mut outputs = None;
    let mut inboxes = None;
    let mut flags = None;
    while flags.is_none() && line.peek() == Some(",") {
        line.literal(",")?;
        if line.peek() == Some("flags") || inboxes.is_some() {
            flags = Some(flag_order(&mut line)?);
            continue;
        }

        let buffers = if outputs.is_none() { "outputs or inboxes" } else { "inboxes" };
        let count = line.read_number(&format!("the number of {buffers}, or flags"))?;
        match line.peek() {
            Some("outputs") if outputs.is_none() => outputs = Some(count),
            Some("inboxes") => inboxes = Some(count),
            _ => return Err(line.fault(line.next, buffers)),
        }

        // The word that was compared is passed over.
        line.word();
        for word in ["in", "turn"] {
            line.literal(word)?;
        }
    }

    line.end()?;
    Ok(Plan {
        collective,
        algorithm,
        rank,
        ranks,
        chunks,
        in_place,
        outputs: outputs.unwrap_or(1),
        inboxes: inboxes.unwrap_or(1),
        flags: flags.unwrap_or_default(),
        lanes: Vec::new(),
    })
}

/// Parses the word `flags` and the flag order after it, and returns the order.
fn flag_order(line: &mut Line<'_>) -> Result<FlagOrder, ParseError> {
    line.literal("flags")?;
    line.read("prompt, batched or network-first", |word| word.parse().ok())
}

/// Parses one line of a plan's text into a step of `rank`'s plan.
fn step(mut line: Line<'_>, rank: Rank) -> Result<Step, ParseError> {
    let step = match line.word() {
        Some("put") => {
            let (cell, from) = line.cell_and_source()?;
            Step::Put { cell, from, peer: line.peer("to")? }
        }
        Some("get") => {
            let (cell, from) = line.cell_and_source()?;
            Step::Get { cell, from, peer: line.peer("of")? }
        }
        Some("reduce") => Step::Reduce { cell: line.cell()?, from: line.peer("of")? },
        Some("signal") => {
            let flag = flag(&mut line, Some(rank))?;
            Step::Signal { flag, peer: line.peer("to")? }
        }
        Some("wait") => Step::Wait { flag: flag(&mut line, None)? },
        // The error names `lane` too, because a new lane could begin at this line. `from_str` reads
        // such lines.
        _ => return Err(line.fault(0, "put, get, reduce, signal, wait or lane")),
    };

    line.end()?;
    Ok(step)
}

/// Parses the next words of `line` into a flag.
///
/// `default` is the rank of a flag whose text contains no rank, if the text may leave it out.
fn flag(line: &mut Line<'_>, default: Option<Rank>) -> Result<Flag, ParseError> {
    // An error about an unknown flag refers to the word at which the flag begins.
    let at = line.next;
    match line.word() {
        Some("ready") => {
            let lane = line.for_lane()?;
            Ok(Flag::Ready { lane, from: line.rank_after("from", default)? })
        }
        Some("free") => {
            let lane = line.for_lane()?;
            Ok(Flag::Free { lane, from: line.rank_after("from", default)? })
        }
        Some("arrived") => Ok(Flag::Arrived { cell: line.cell()?, lane: line.for_lane()? }),
        Some("contributed") => Ok(Flag::Contributed { cell: line.cell()?, lane: line.for_lane()? }),
        Some("taken") => {
            let lane = line.for_lane()?;
            Ok(Flag::Taken { lane, by: line.rank_after("by", default)? })
        }
        Some("go") => Ok(Flag::Go { lane: line.lane()? }),
        Some("sent") => Ok(Flag::Sent { lane: line.lane()? }),
        _ => Err(line.fault(at, "ready, free, arrived, contributed, taken, go or sent")),
    }
}

/// Splits one line of a plan's text into words, and reads them in order.
///
/// Commas and colons count as separate words.
struct Line<'a> {
    number: usize,
    /// The text of the line without white space at its ends, for errors.
    text: &'a str,
    words: Vec<&'a str>,
    /// The index of the word to read next, which can exceed the number of words.
    next: usize,
}

impl<'a> Line<'a> {
    fn new(number: usize, text: &'a str) -> Self {
        let words = text.split_whitespace().flat_map(split_punctuation).collect();
        Self { number, text: text.trim(), words, next: 0 }
    }

    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.next).copied()
    }

    /// Reads and returns the next word, or returns `None` at the end of the line.
    fn word(&mut self) -> Option<&'a str> {
        let word = self.peek();
        self.next += 1;
        word
    }

    /// Reads the next word, and returns the value that `parse` makes of it.
    ///
    /// If the word is missing or `parse` returns `None`, `expected` describes the valid words in
    /// the error.
    fn read<T>(
        &mut self,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ParseError> {
        let at = self.next;
        self.word().and_then(parse).ok_or_else(|| self.fault(at, expected))
    }

    /// Reads the next word, and fails if it is not `expected`.
    fn literal(&mut self, expected: &str) -> Result<(), ParseError> {
        self.read(&format!("{expected:?}"), |word| (word == expected).then_some(()))
    }

    /// Parses the name of a collective, and the root if the collective has one.
    fn collective(&mut self) -> Result<Collective, ParseError> {
        let collective = self.read(&known_collectives(), Collective::of_name)?;
        match collective.root() {
            None => Ok(collective),
            Some(_) => Ok(collective.with_root(self.peer(collective.root_word())?)),
        }
    }

    fn read_number(&mut self, what: &str) -> Result<u32, ParseError> {
        self.read(what, parse_number)
    }

    fn rank(&mut self) -> Result<Rank, ParseError> {
        self.read_number("the number of a rank").map(Rank)
    }

    fn lane(&mut self) -> Result<LaneId, ParseError> {
        self.literal("lane")?;
        self.read_number("the number of a lane").map(LaneId)
    }

    /// Parses the lane that waits for a flag, which is lane 0 if the text contains none.
    fn for_lane(&mut self) -> Result<LaneId, ParseError> {
        if self.peek() != Some("for") {
            return Ok(LaneId::HOME);
        }

        self.literal("for")?;
        self.lane()
    }

    /// Parses `word` and the rank after it, or returns `default` if the next word is another one.
    ///
    /// Without a default, `word` is required.
    fn rank_after(&mut self, word: &str, default: Option<Rank>) -> Result<Rank, ParseError> {
        match default {
            Some(default) if self.peek() != Some(word) => Ok(default),
            _ => self.peer(word),
        }
    }

    /// Parses `word` and the rank after it, and returns the rank.
    fn peer(&mut self, word: &str) -> Result<Rank, ParseError> {
        self.literal(word)?;
        self.rank()
    }

    fn cell_and_source(&mut self) -> Result<(Cell, Source), ParseError> {
        let cell = self.cell()?;
        let from = self.read("input or output", |word| match word {
            "input" => Some(Source::Input),
            "output" => Some(Source::Output),
            _ => None,
        })?;

        Ok((cell, from))
    }

    fn cell(&mut self) -> Result<Cell, ParseError> {
        self.read("a cell such as 2.0, block and chunk", |word| {
            let (block, chunk) = word.split_once('.')?;
            Some(Cell { block: Rank(parse_number(block)?), chunk: parse_number(chunk)? })
        })
    }

    fn end(&mut self) -> Result<(), ParseError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.fault(self.next, "the end of the line")),
        }
    }

    /// Returns the error that the word with index `at` does not have the form that `expected`
    /// describes.
    fn fault(&self, at: usize, expected: &str) -> ParseError {
        let found = self.words.get(at).map_or("the end of the line".into(), |word| quoted(word));
        ParseError { line: self.number, text: self.text.into(), expected: expected.into(), found }
    }
}

fn known_collectives() -> String {
    let names: Vec<_> = Collective::ALL.iter().map(|one| one.name()).collect();
    let (last, others) = names.split_last().expect("there are collectives");
    format!("{} or {last}", others.join(", "))
}

/// Parses a decimal number without a sign.
///
/// The standard parser would also accept a plus sign.
fn parse_number(word: &str) -> Option<u32> {
    if word.starts_with('+') {
        return None;
    }

    word.parse().ok()
}

/// Splits a word into its text and a comma or colon at its end, and leaves out empty parts.
fn split_punctuation(word: &str) -> impl Iterator<Item = &str> {
    let body_bytes = word.strip_suffix([',', ':']).unwrap_or(word).len();
    let (body, punctuation) = word.split_at(body_bytes);
    [body, punctuation].into_iter().filter(|word| !word.is_empty())
}
