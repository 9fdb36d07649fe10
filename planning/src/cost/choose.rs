//! Chooses the algorithm and the number of chunks with the lowest predicted time, and explains the
//! choice.

use std::fmt;

use peerlane_hal::ErrorKind;
use serde::Serialize;

use super::form::Form;
use super::launch::Transfer;
use super::predict::{Cost, check_blocks, cost};
use crate::error::Error;
use crate::links::Links;
use crate::plan::{Algorithm, CHUNKS_MAX};
use crate::schedule::estimate::{ClusterSums, CostRequest, touched_bytes};
use crate::schedule::{Shape, algorithms, check_fits, check_inboxes, fitting, misfit, schedule};
use crate::topology::Topology;
use crate::units::{bytes, time};

/// The divisor that turns a predicted time into the largest difference that counts as equal.
///
/// No cost model is more exact, so the simpler plan wins.
const TOLERANCE_DIVISOR: u64 = 50;
/// The divisor instead of [`TOLERANCE_DIVISOR`] if link rates are assumed and not measured.
const TOLERANCE_DIVISOR_ASSUMED: u64 = 5;
/// The picoseconds that are added to the tolerated difference if rates are assumed and processors
/// copy.
///
/// A context switch takes about this time, and each further flag can need one where ranks share
/// cores. If processors drive the network too, a message takes as long, which the prediction
/// counts.
const TOLERANCE_ASSUMED: u64 = 5_000_000;

/// Computes the largest difference between two predicted times that count as equal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tolerance {
    divisor: u64,
    picoseconds: u64,
}

impl Tolerance {
    fn new(measured: bool, links: &Links) -> Self {
        match measured {
            true => Self { divisor: TOLERANCE_DIVISOR, picoseconds: 0 },
            false => Self {
                divisor: TOLERANCE_DIVISOR_ASSUMED,
                picoseconds: match (links.local.by_processor, links.network.by_processor) {
                    (true, false) => TOLERANCE_ASSUMED,
                    _ => 0,
                },
            },
        }
    }

    /// Returns the largest difference up to which another time counts as equal to `picoseconds`.
    fn margin(self, picoseconds: u64) -> u64 {
        (picoseconds / self.divisor.max(1)).saturating_add(self.picoseconds)
    }
}

/// The smallest chunk, in bytes, that [`choose`] considers, unless a block is smaller.
const CHUNK_BYTES_MIN: u64 = 64 << 10;
/// The largest number of chunks that [`choose`] considers.
const CHUNKS_TRIED_MAX: u32 = 64;
/// The largest chunk, in bytes, that [`choose`] considers if a network reaches other nodes.
///
/// A node can distribute a chunk only after all of it has arrived over the network.
const NETWORK_CHUNK_BYTES_MAX: u64 = 8 << 20;

/// The sizes, link rates and topology from which an algorithm is chosen. Equal inputs on all ranks
/// give equal choices.
#[derive(Clone, Copy, Debug)]
pub struct Question<'a> {
    /// The nodes of the group, and the ranks that belong to each of them.
    pub topology: &'a Topology,
    /// The length of each rank's block in bytes.
    pub block_bytes: &'a [u64],
    /// The options of the plan, without the number of chunks ([`Shape::chunks`]).
    pub shape: Shape,
    /// The link rates from which times are predicted.
    pub links: &'a Links,
    /// Whether the link rates were measured on this machine, and not assumed. If they are assumed,
    /// a less simple plan must be faster by a fifth, and by 5 µs where processors copy and do not
    /// drive the network.
    pub measured: bool,
    /// The algorithm that the caller has selected; `None` to compare all.
    pub algorithm: Option<Algorithm>,
    /// The number of chunks that the caller has selected; `None` to compare several.
    pub chunks: Option<u32>,
    /// The algorithms that must not be chosen, with the reasons.
    pub refused: &'a [(Algorithm, &'a str)],
}

/// One way to execute an operation, among those that [`choose_among`] compares: with engines of one
/// kind, and in one form.
#[derive(Clone, Copy, Debug)]
pub struct Variant<'a> {
    /// The kind of the engines, such as `streams`, or an empty text if the kind does not matter.
    pub engine: &'a str,
    /// The form of an all-reduce; `None` for other collectives.
    pub form: Option<Form>,
    /// How the data of fused starts moves; `None` if starts are not fused.
    pub transfer: Option<Transfer>,
    /// The sizes, options and rates of the operation in this form with these engines.
    pub question: Question<'a>,
}

/// The chosen algorithm, number of chunks, engines and form, with the alternatives and their
/// predicted costs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Choice {
    /// The chosen algorithm, whose predicted time is the shortest, or close to it with a simpler
    /// plan.
    pub algorithm: Algorithm,
    /// The number of chunks into which each block is cut.
    pub chunks: u32,
    /// The kind of the chosen engines, or an empty text if the kind was not compared.
    pub engine: String,
    /// The chosen form of an all-reduce; `None` for other collectives.
    pub form: Option<Form>,
    /// How the data of fused starts moves; `None` if starts are not fused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Transfer>,
    /// The predicted cost of the chosen algorithm.
    pub cost: Cost,
    /// The best candidate of each algorithm with each kind of engines in each form; the chosen one
    /// comes first, then the fastest.
    pub candidates: Vec<Candidate>,
    /// The algorithms that were excluded from the choice, with the reasons.
    pub refused: Vec<(Algorithm, String)>,
    /// The kinds of engines that were excluded from the choice, with the reasons.
    pub refused_engines: Vec<(String, String)>,
    subject: String,
    #[serde(skip)]
    tolerance: Tolerance,
}

/// One algorithm that was considered, with its best number of chunks and its predicted cost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The algorithm that was considered.
    pub algorithm: Algorithm,
    /// The number of chunks that is fastest for this algorithm.
    pub chunks: u32,
    /// The kind of the engines that would execute it.
    pub engine: String,
    /// The form of an all-reduce; `None` for other collectives.
    pub form: Option<Form>,
    /// How the data of fused starts moves; `None` if starts are not fused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer: Option<Transfer>,
    /// The predicted cost of the algorithm with this number of chunks.
    pub cost: Cost,
}

/// Chooses the algorithm and the number of chunks with the smallest predicted time.
///
/// Among times within 2 % of the fastest, or 20 % (and 5 µs where processors copy) if the links
/// were not measured, the first algorithm in the order of [`Algorithm::ALL`] and the fewest chunks
/// win. Only whole numbers are compared, so equal questions have equal answers on all ranks.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument) if the links are impossible, there are not as
/// many blocks as ranks, the number of chunks is out of bounds, the root does not exist, the
/// algorithm does not suit the collective or the topology, or every algorithm is excluded.
pub fn choose(question: &Question<'_>) -> Result<Choice, Error> {
    choose_among(&[Variant { engine: "", form: None, transfer: None, question: *question }], &[])
}

/// Chooses the variant, algorithm and number of chunks with the smallest predicted time.
///
/// In each variant the algorithm is chosen as by [`choose`]. Among the variants the fastest one
/// wins, and the first of those that are equally fast. `refused_engines` are the kinds of engines
/// that are not among the variants, with the reasons.
///
/// # Errors
/// As [`choose`], if no variant has a candidate, or there is no variant.
pub fn choose_among(
    variants: &[Variant<'_>],
    refused_engines: &[(String, String)],
) -> Result<Choice, Error> {
    let answers: Vec<Result<Answer, Error>> = variants.iter().map(Answer::new).collect();
    let fastest = answers.iter().flatten().min_by_key(|answer| answer.best.cost.picoseconds);
    let Some(Answer { best, subject, tolerance, .. }) = fastest.cloned() else {
        let error = answers.into_iter().find_map(Result::err);
        let none = || invalid("variants is empty, expected at least one".to_owned());
        return Err(error.unwrap_or_else(none));
    };

    let mut candidates = Vec::new();
    let mut reasons = Vec::new();
    for answer in answers.into_iter().flatten() {
        candidates.extend(answer.candidates);
        reasons.extend(answer.refused);
    }
    candidates.sort_by_key(|candidate| (*candidate != best, candidate.cost.picoseconds));

    // An algorithm that one variant excludes can be a candidate in another.
    let mut refused: Vec<(Algorithm, String)> = Vec::new();
    for (algorithm, why) in reasons {
        let is_candidate = candidates.iter().any(|candidate| candidate.algorithm == algorithm);
        if !is_candidate && refused.iter().all(|(known, _)| *known != algorithm) {
            refused.push((algorithm, why));
        }
    }

    let Candidate { algorithm, chunks, engine, form, transfer, cost } = best;
    let refused_engines = refused_engines.to_vec();
    Ok(Choice {
        algorithm,
        chunks,
        engine,
        form,
        transfer,
        cost,
        candidates,
        refused,
        refused_engines,
        subject,
        tolerance,
    })
}

/// The answer to the question of one variant.
#[derive(Clone)]
struct Answer {
    best: Candidate,
    /// The best candidate of each algorithm.
    candidates: Vec<Candidate>,
    refused: Vec<(Algorithm, String)>,
    subject: String,
    tolerance: Tolerance,
}

impl Answer {
    fn new(variant: &Variant<'_>) -> Result<Self, Error> {
        let Question { topology, block_bytes, shape, links, algorithm, chunks, refused, .. } =
            variant.question;
        links.check()?;
        check_blocks(topology, block_bytes)?;

        if let Some(chunks) = chunks.filter(|chunks| !(1..=CHUNKS_MAX).contains(chunks)) {
            return Err(invalid(format!("chunks is {chunks}, expected 1 to {CHUNKS_MAX}")));
        }
        match algorithm {
            Some(algorithm) => check_fits(algorithm, topology, shape)?,
            None => {
                shape.collective.check(topology.ranks(), shape.in_place).map_err(invalid)?;
                // The simplest algorithm allows the most inboxes, so an error is one of all.
                check_inboxes(Algorithm::Direct, shape)?;
            }
        }

        let tolerance = Tolerance::new(variant.question.measured, links);
        let sums = ClusterSums::new(topology, shape.collective, block_bytes);
        let adjusted = links.adjusted_to(touched_bytes(&sums, shape));

        let is_refused = |one| refused.iter().any(|(other, _)| *other == one);
        // An algorithm that the caller selects is used even if a simpler one has the same plans.
        let degenerate = |one| algorithm.is_none().then(|| degenerate(one, &sums)).flatten();
        let mut candidates = Vec::new();
        for one in fitting(topology, shape) {
            let is_other = algorithm.is_some_and(|expected| expected != one);
            if is_other || is_refused(one) || degenerate(one).is_some() {
                continue;
            }

            let numbers = chunks.map_or_else(|| chunk_counts(one, &sums, shape), |n| vec![n]);
            let of_algorithm = numbers.into_iter().map(|chunks| {
                let shape = Shape { chunks, ..shape };
                let links = &adjusted;
                let cost = cost(&CostRequest { algorithm: one, sums: &sums, shape, links });
                let (engine, form) = (variant.engine.to_owned(), variant.form);
                let transfer = variant.transfer;
                Candidate { algorithm: one, chunks, engine, form, transfer, cost }
            });
            candidates.extend(simplest(of_algorithm.collect(), tolerance));
        }

        let best = simplest(candidates.clone(), tolerance);
        let best = best.ok_or_else(|| no_candidate(algorithm, refused))?;

        let excluded = fitting(topology, shape).filter_map(degenerate);
        let unfit = algorithms(shape.collective)
            .filter(|_| algorithm.is_none())
            .filter_map(|one| Some((one, misfit(one, topology, shape)?)));
        let others = excluded.chain(unfit).filter(|&(one, _)| !is_refused(one));
        let reasons = refused.iter().copied().chain(others);
        let refused = reasons.map(|(which, why)| (which, why.to_owned())).collect();

        let subject = subject(topology, &sums);
        Ok(Self { best, candidates, refused, subject, tolerance })
    }
}

/// Returns `algorithm` and a reason to exclude it, if a simpler algorithm has the same plans.
fn degenerate(algorithm: Algorithm, sums: &ClusterSums) -> Option<(Algorithm, &'static str)> {
    Some((algorithm, (schedule(algorithm).redundant)(sums)?))
}

/// Returns the first candidate whose time counts as equal to that of the fastest candidate.
///
/// The candidates are ordered from the simplest to the most complex.
fn simplest(candidates: Vec<Candidate>, tolerance: Tolerance) -> Option<Candidate> {
    let fastest = candidates.iter().map(|candidate| candidate.cost.picoseconds).min()?;
    let limit = fastest.saturating_add(tolerance.margin(fastest));

    candidates.into_iter().find(|candidate| candidate.cost.picoseconds <= limit)
}

/// Returns the numbers of chunks to compare for an algorithm, in ascending order.
fn chunk_counts(algorithm: Algorithm, sums: &ClusterSums, shape: Shape) -> Vec<u32> {
    // Without forwarding nothing is pipelined, so more chunks only mean more puts.
    if !(schedule(algorithm).forwards)(sums) {
        return vec![1];
    }
    let in_round = u32::try_from((schedule(algorithm).chunks_in_round)(sums.ranks));
    let in_round = in_round.unwrap_or(CHUNKS_MAX).min(CHUNKS_MAX);

    let chunk_bytes = |chunks: u32| sums.block_bytes_max / u64::from(chunks);
    let rounds = (0..CHUNKS_TRIED_MAX.ilog2() + 1).map(|power| in_round << power);
    let numbers: Vec<u32> = rounds
        .take_while(|&chunks| chunks == in_round || chunks <= CHUNKS_TRIED_MAX)
        .filter(|&chunks| chunks == in_round || chunk_bytes(chunks) >= CHUNK_BYTES_MIN)
        .collect();

    let network = shape.tiers && sums.nodes > 1;
    let is_fitting = |chunks: u32| !network || chunk_bytes(chunks) <= NETWORK_CHUNK_BYTES_MAX;
    let fitting: Vec<u32> = numbers.iter().copied().filter(|&chunks| is_fitting(chunks)).collect();
    // Without a fitting number, the one with the smallest chunks is tried.
    if fitting.is_empty() { numbers.last().copied().into_iter().collect() } else { fitting }
}

fn no_candidate(expected: Option<Algorithm>, refused: &[(Algorithm, &str)]) -> Error {
    // If the caller has selected an algorithm, the reasons for others do not matter.
    let relevant =
        |(which, _): &&(Algorithm, &str)| expected.is_none_or(|expected| *which == expected);
    let texts = refused.iter().filter(relevant).map(|(which, why)| format!("{which}: {why}"));
    let reasons = texts.collect::<Vec<_>>().join("; ");

    invalid(format!("no algorithm supports this operation: {reasons}"))
}

fn subject(topology: &Topology, sums: &ClusterSums) -> String {
    let ClusterSums { block_bytes_min: least, block_bytes_max: most, total_bytes, .. } = *sums;
    let blocks =
        if least == most { bytes(most) } else { format!("{} to {}", bytes(least), bytes(most)) };

    format!("{topology}, blocks of {blocks}, {} in all", bytes(total_bytes))
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

impl Choice {
    /// Returns a few lines of text that explain why the algorithm was chosen.
    ///
    /// The text has the best plan of every algorithm, what was excluded, and the terms of the
    /// chosen time.
    pub fn explain(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, chunks, cost, subject, tolerance, .. } = self;
        let engine = by_engine(&self.engine, self.transfer);
        write!(f, "{subject}: {algorithm}, chunks {chunks}")?;
        if let Some(form) = self.form {
            write!(f, ", {}", form.name())?;
        }
        if !engine.is_empty() {
            write!(f, ", by {engine}")?;
        }
        writeln!(f)?;

        // What all candidates have in common is in the first line only.
        let has_forms = self.candidates.iter().any(|other| other.form != self.form);
        let has_engines = self
            .candidates
            .iter()
            .any(|other| (&other.engine, other.transfer) != (&self.engine, self.transfer));
        let is_fused = |candidate: &Candidate| candidate.transfer.is_some();
        let width = if self.candidates.iter().any(is_fused) { 16 } else { 12 };
        for (index, candidate) in self.candidates.iter().enumerate() {
            let Candidate { algorithm, chunks, ref engine, form, transfer, cost: ref other } =
                *candidate;
            let relation = relation(cost.picoseconds, other.picoseconds, *tolerance);
            let note = if index == 0 { "chosen" } else { &relation };
            let time = time(other.picoseconds);

            write!(f, "  {algorithm:<18} chunks {chunks:<3} ")?;
            if has_forms {
                write!(f, "{:<9}", form.map_or("", Form::name))?;
            }
            if has_engines {
                write!(f, "by {:<width$}", by_engine(engine, transfer))?;
            }
            writeln!(f, "{time:>9}  {note}")?;
        }

        for (algorithm, why) in &self.refused {
            writeln!(f, "  {algorithm:<18} not used: {why}")?;
        }
        for (engine, why) in &self.refused_engines {
            writeln!(f, "  {engine:<18} not used: {why}")?;
        }

        write!(f, "predicted: {cost}")
    }
}

/// Returns the kind of engines for tables, with the transfer of fused starts.
fn by_engine(engine: &str, transfer: Option<Transfer>) -> String {
    match transfer {
        Some(transfer) => format!("{engine}, {}", transfer.name()),
        None => engine.to_owned(),
    }
}

/// Returns a note such as `1.25 times as long`, which compares the predicted time `other` of a
/// candidate with the time `chosen`.
///
/// Where the difference is within `tolerance`, the note says that the candidate is as fast.
fn relation(chosen: u64, other: u64, tolerance: Tolerance) -> String {
    if other.saturating_sub(tolerance.margin(other)) <= chosen {
        return "as fast, but less simple".to_owned();
    }

    // A predicted time can be 0, which must not be the divisor.
    let times = other as f64 / chosen.max(1) as f64;
    format!("{times:.2} times as long")
}
