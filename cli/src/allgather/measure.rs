//! One size: its limit, checks before and after, and the timed iterations between.

use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};
use peerlane::bootstrap::Bootstrap;
use peerlane::group::Report;
use peerlane::hal::{BackendId, Fabric};
use peerlane::{AllGather, Element, Group};

use super::circle::Circle;
use super::clock::{Pace, Timing};
use super::data::{Data, poison};
use super::event::{Activity, Event, Sink};
use super::limit::{Copies, Limit};
use super::options::{AlgorithmChoice, Options};
use super::statistics::{Statistics, longest_of_each};
use crate::error::{Failure, Result};
use crate::report::{Row, bandwidths, microseconds};

/// Everything that a rank measures with.
pub(crate) struct Bench<'a, F: Fabric> {
    pub(crate) options: &'a Options,
    pub(crate) backend: BackendId,
    pub(crate) seed: u64,
    pub(crate) pace: Pace,
    pub(crate) circle: Circle,
    pub(crate) group: Group<F>,
    pub(crate) limit: Option<Limit<F>>,
    pub(crate) sink: Sink<'a>,
}

impl<F: Fabric> Bench<'_, F> {
    /// Tells the one who prints, if this rank is the one that tells.
    ///
    /// # Errors
    /// If that one is gone.
    pub(crate) fn tell(&mut self, event: Event) -> Result<()> {
        if self.circle.rank().0 == 0 { (self.sink)(event) } else { Ok(()) }
    }

    /// Measures and checks shards of so many elements; `index` counts the sizes. Collective.
    ///
    /// # Errors
    /// If the operation fails, or a byte is wrong on any rank.
    pub(crate) fn size<T: Element>(&mut self, index: usize, shard_length: u64) -> Result<()> {
        let sweep = self.options.sweep(self.circle.ranks());
        let total_bytes = sweep.total_bytes(shard_length);
        let doing = |activity| Event::Doing { activity, total_bytes };
        let limit = if self.limit.is_some() {
            self.tell(doing(Activity::Limit))?;
            self.measure_limit(sweep.shard_bytes(shard_length))?
        } else {
            None
        };
        let mut gather = self.prepare::<T>(shard_length)?;
        let data = |round| Data { seed: self.seed, size: index as u64, round };
        let (before, after) = (data(0), data(1));
        self.tell(doing(Activity::Check))?;
        self.check(&mut gather, before)?;
        self.tell(doing(Activity::Measure))?;
        let timing = {
            let Self { pace, circle, group, .. } = self;
            pace.time(circle, group, longest_of_each, || Ok(gather.run()?))?
        };
        self.tell(doing(Activity::Check))?;
        self.check(&mut gather, after)?;
        let row = self.row(gather.report(), timing, limit);
        drop(gather);
        // The next size is allocated when the memory of this one is free on every rank.
        self.group.barrier()?;
        self.tell(Event::Row { row: Box::new(row) })
    }

    fn measure_limit(&mut self, shard_bytes: u64) -> Result<Option<Duration>> {
        let Self { options, pace, circle, group, limit, .. } = self;
        let Some(limit) = limit else { return Ok(None) };
        let copies = Copies { shard_bytes, in_place: options.in_place };
        limit.measure(copies, *pace, circle, group).map(Some)
    }

    fn prepare<T: Element>(&mut self, shard_length: u64) -> Result<AllGather<T>> {
        let length = usize::try_from(shard_length)
            .map_err(|_| Failure::usage("--max-bytes is more than this machine can address"))?;
        let mut builder = self.group.all_gather::<T>(length).timeout(self.options.timeout);
        if let AlgorithmChoice::Named(algorithm) = self.options.algorithm {
            builder = builder.algorithm(algorithm);
        }
        if self.options.in_place {
            builder = builder.in_place();
        }
        if let Some(outputs) = self.options.outputs {
            builder = builder.outputs(outputs);
        }
        Ok(builder.prepare()?)
    }

    /// Gathers fresh data into a poisoned output, compares every byte, and learns whether all other
    /// ranks found theirs right.
    fn check<T: Element>(&mut self, gather: &mut AllGather<T>, data: Data) -> Result<()> {
        let (rank, ranks) = (self.circle.rank().index(), self.circle.ranks());
        let mut found = Ok(());
        // Of two outputs in turn the next start fills the other one: after the last of these starts
        // every output has been poisoned, filled and compared.
        for _ in 0..gather.report().outputs {
            poison(cast_slice_mut(gather.output_mut()?));
            data.fill(rank, cast_slice_mut(gather.input_mut()?));
            gather.run()?;
            found = found.and(data.check(cast_slice(gather.output()?), ranks));
        }
        let texts = self.circle.share("check", &found.err().map(|wrong| wrong.to_string()))?;
        match texts.into_iter().enumerate().find_map(|(rank, text)| Some((rank, text?))) {
            None => Ok(()),
            Some((rank, text)) => {
                Err(Failure::failed(format!("wrong data in the output of rank {rank}: {text}"))
                    .with_advice(
                        "this is a fault in Peerlane or in the hardware: please report it",
                    ))
            }
        }
    }

    fn row(&self, report: &Report, timing: Timing, limit: Option<Duration>) -> Row {
        let Statistics { median, p99, max } = timing.statistics;
        let (algbw_gbs, busbw_gbs) = bandwidths(report.total_bytes, report.ranks, median);
        Row {
            backend: self.backend.to_string(),
            ranks: report.ranks,
            algorithm: report.algorithm.to_string(),
            engine: engine(report),
            dtype: self.options.dtype.to_string(),
            in_place: self.options.in_place,
            outputs: report.outputs,
            total_bytes: report.total_bytes,
            shard_bytes: report.shard_bytes,
            iterations: timing.iterations,
            median_us: microseconds(median),
            p99_us: microseconds(p99),
            max_us: microseconds(max),
            algbw_gbs,
            busbw_gbs,
            checked: true,
            limit: limit.map(|limit| crate::report::Limit::new(limit, median)),
            device: None,
            rivals_version: None,
            rivals: Vec::new(),
            beside: Vec::new(),
        }
    }
}

/// The backends of the lanes, each once, with a count where it has several, and the ways around what
/// devices lack.
pub(crate) fn engine(report: &Report) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for lane in &report.lanes {
        let name = lane.backend.to_string();
        match counts.iter_mut().find(|(seen, _)| *seen == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let names = counts.into_iter().map(|(name, count)| match count {
        1 => name,
        _ => format!("{count} × {name}"),
    });
    let mut text = names.collect::<Vec<_>>().join(" + ");
    let mut ways: Vec<_> = report.fallbacks.iter().map(|fallback| fallback.name()).collect();
    ways.dedup();
    for way in ways {
        text = format!("{text}, {way}");
    }
    text
}
