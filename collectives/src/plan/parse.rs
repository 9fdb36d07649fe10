//! Reads plans from text.
//!
//! Blank lines and indentation are ignored. Only the form is checked, not whether the plan is correct.

use std::str::FromStr;

use peerlane_hal::{ErrorKind, Rank};

use crate::collective::Collective;

use super::algorithm;
use super::{Algorithm, Cell, Flag, FlagOrder, Lane, LaneId, Plan, Source, Step, Tier};

/// Describes a line that is not part of a plan.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} {text:?}: expected {expected}, found {found}")]
pub struct ParseError {
    /// The number of the line, from 1.
    pub line: usize,
    /// The line, trimmed.
    pub text: String,
    /// What was expected.
    pub expected: String,
    /// The word that was found instead, in quotes, or the end of the line.
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
        let mut plan = header(lines.next().unwrap_or_else(|| Line::new(1, "")))?;
        for mut line in lines {
            if line.words[0] == "lane" {
                line.literal("lane")?;
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

fn header(mut line: Line<'_>) -> Result<Plan, ParseError> {
    let collective = line.collective()?;
    let algorithm = line.read(&algorithm::known(), |word| word.parse::<Algorithm>().ok())?;
    line.literal(":")?;
    line.literal("rank")?;
    let rank = line.rank()?;
    line.literal("of")?;
    let ranks = line.number("the number of ranks")?;
    line.literal(",")?;
    let chunks = line.number("the number of chunks")?;
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
    let (mut outputs, mut flags) = (1, FlagOrder::Prompt);
    if line.peek() == Some(",") {
        line.literal(",")?;
        if line.peek() != Some("flags") {
            outputs = line.number("the number of outputs, or flags")?;
            ["outputs", "in", "turn"].into_iter().try_for_each(|word| line.literal(word))?;
            if line.peek() == Some(",") {
                line.literal(",")?;
                flags = flag_order(&mut line)?;
            }
        } else {
            flags = flag_order(&mut line)?;
        }
    }
    line.end()?;
    let lanes = Vec::new();
    Ok(Plan { collective, algorithm, rank, ranks, chunks, in_place, outputs, flags, lanes })
}

fn flag_order(line: &mut Line<'_>) -> Result<FlagOrder, ParseError> {
    line.literal("flags")?;
    line.read("prompt or batched", |word| word.parse().ok())
}

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
        Some("signal") => {
            let flag = flag(&mut line, Some(rank))?;
            Step::Signal { flag, peer: line.peer("to")? }
        }
        Some("wait") => Step::Wait { flag: flag(&mut line, None)? },
        _ => return Err(line.fault(0, "put, get, signal, wait or lane")),
    };
    line.end()?;
    Ok(step)
}

/// Reads a flag; `speaker` is the rank of `ready` and `taken` if the text names none.
fn flag(line: &mut Line<'_>, speaker: Option<Rank>) -> Result<Flag, ParseError> {
    let at = line.next;
    match line.word() {
        Some("ready") => {
            let lane = line.for_lane()?;
            Ok(Flag::Ready { lane, from: line.speaker("from", speaker)? })
        }
        Some("arrived") => Ok(Flag::Arrived { cell: line.cell()?, lane: line.for_lane()? }),
        Some("taken") => {
            let lane = line.for_lane()?;
            Ok(Flag::Taken { lane, by: line.speaker("by", speaker)? })
        }
        Some("go") => Ok(Flag::Go { lane: line.lane()? }),
        Some("sent") => Ok(Flag::Sent { lane: line.lane()? }),
        _ => Err(line.fault(at, "ready, arrived, taken, go or sent")),
    }
}

/// The words of one line. Commas and colons are separate words.
struct Line<'a> {
    number: usize,
    text: &'a str,
    words: Vec<&'a str>,
    next: usize,
}

impl<'a> Line<'a> {
    fn new(number: usize, text: &'a str) -> Self {
        let words = text.split_whitespace().flat_map(split_mark).collect();
        Self { number, text: text.trim(), words, next: 0 }
    }

    fn peek(&self) -> Option<&'a str> {
        self.words.get(self.next).copied()
    }

    fn word(&mut self) -> Option<&'a str> {
        let word = self.peek();
        self.next += 1;
        word
    }

    fn read<T>(
        &mut self,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ParseError> {
        let at = self.next;
        self.word().and_then(parse).ok_or_else(|| self.fault(at, expected))
    }

    fn literal(&mut self, wanted: &str) -> Result<(), ParseError> {
        self.read(&format!("{wanted:?}"), |word| (word == wanted).then_some(()))
    }

    fn collective(&mut self) -> Result<Collective, ParseError> {
        let name = self.read("all-gather, broadcast or all-to-all", |word| {
            Collective::NAMES.iter().copied().find(|name| *name == word)
        })?;
        Ok(match name {
            "broadcast" => Collective::Broadcast { root: self.peer("from")? },
            "all-to-all" => Collective::AllToAll,
            _ => Collective::AllGather,
        })
    }

    fn number(&mut self, what: &str) -> Result<u32, ParseError> {
        self.read(what, number)
    }

    fn rank(&mut self) -> Result<Rank, ParseError> {
        self.number("the number of a rank").map(Rank)
    }

    fn lane(&mut self) -> Result<LaneId, ParseError> {
        self.literal("lane")?;
        self.number("the number of a lane").map(LaneId)
    }

    /// Reads the lane that waits, or lane 0 if the text names none.
    fn for_lane(&mut self) -> Result<LaneId, ParseError> {
        if self.peek() != Some("for") {
            return Ok(LaneId::HOME);
        }
        self.literal("for")?;
        self.lane()
    }

    /// Reads the rank after `word`, or returns the speaker if there is no such word.
    fn speaker(&mut self, word: &str, speaker: Option<Rank>) -> Result<Rank, ParseError> {
        match speaker {
            Some(speaker) if self.peek() != Some(word) => Ok(speaker),
            _ => self.peer(word),
        }
    }

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
        self.read("a cell such as 2.0, shard and chunk", |word| {
            let (shard, chunk) = word.split_once('.')?;
            Some(Cell { shard: Rank(number(shard)?), chunk: number(chunk)? })
        })
    }

    fn end(&mut self) -> Result<(), ParseError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.fault(self.next, "the end of the line")),
        }
    }

    fn fault(&self, at: usize, expected: &str) -> ParseError {
        let found = self.words.get(at).map_or("the end of the line".into(), |w| format!("{w:?}"));
        ParseError { line: self.number, text: self.text.into(), expected: expected.into(), found }
    }
}

/// Reads digits; the standard parser would also accept a plus sign.
fn number(word: &str) -> Option<u32> {
    if word.starts_with('+') {
        return None;
    }
    word.parse().ok()
}

fn split_mark(word: &str) -> impl Iterator<Item = &str> {
    let body = word.strip_suffix([',', ':']).unwrap_or(word);
    let (body, mark) = word.split_at(body.len());
    [body, mark].into_iter().filter(|word| !word.is_empty())
}
