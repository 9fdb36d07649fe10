//! Writes timelines of ranks and lanes as trace events for Perfetto and Chrome.
//!
//! The format is the JSON of Chrome's trace viewer. A rank is a process and a lane is a thread of
//! it. Slices of one thread must nest, so overlapping steps of one lane go to further threads.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// The maximum number of parallel tracks of one lane in a trace file; steps that still overlap share the last track.
const TRACKS: u64 = 16;

/// One step of a lane on the timeline of a trace file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceEvent {
    pub(crate) rank: u32,
    pub(crate) lane: u32,
    pub(crate) name: String,
    /// The start in nanoseconds from an origin that all events share.
    pub(crate) start_ns: f64,
    pub(crate) duration_ns: f64,
}

/// Returns the content of a trace file with `title` in its metadata.
pub(crate) fn render(title: &str, mut events: Vec<TraceEvent>) -> String {
    events.sort_by(|a, b| {
        let lanes = (a.rank, a.lane).cmp(&(b.rank, b.lane));
        lanes.then(a.start_ns.total_cmp(&b.start_ns)).then(b.duration_ns.total_cmp(&a.duration_ns))
    });
    // The end of the last slice of each thread of a lane.
    let mut tracks: BTreeMap<(u32, u32), Vec<f64>> = BTreeMap::new();
    let mut lines: Vec<Value> = Vec::with_capacity(events.len());
    for event in &events {
        let ends = tracks.entry((event.rank, event.lane)).or_default();
        let free = ends.iter().position(|&end| end <= event.start_ns);
        let track = free.unwrap_or(ends.len()).min(TRACKS as usize - 1);
        if track == ends.len() {
            ends.push(0.0);
        }
        ends[track] = ends[track].max(event.start_ns + event.duration_ns);
        lines.push(line(event, track as u64));
    }
    let names = tracks.iter().flat_map(|(&(rank, lane), ends)| names(rank, lane, ends.len()));
    let all: Vec<Value> = names.chain(lines).collect();
    // One event per line, because people read these files.
    let text: Vec<String> = all.iter().map(Value::to_string).collect();
    let title = Value::from(title);
    format!(
        "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"title\":{title}}},\"traceEvents\":[\n{}
]}}
",
        text.join(",\n")
    )
}

fn line(event: &TraceEvent, track: u64) -> Value {
    let TraceEvent { rank, lane, name, start_ns, duration_ns } = event;
    let thread = u64::from(*lane) * TRACKS + track;
    // The format uses microseconds.
    let start = start_ns / 1000.0;
    if *duration_ns > 0.0 {
        let duration = duration_ns / 1000.0;
        return json!({
            "ph": "X", "pid": rank, "tid": thread, "name": name, "ts": start, "dur": duration
        });
    }
    json!({"ph": "i", "s": "t", "pid": rank, "tid": thread, "name": name, "ts": start})
}

fn names(rank: u32, lane: u32, tracks: usize) -> Vec<Value> {
    let process = json!({
        "ph": "M", "pid": rank, "name": "process_name", "args": {"name": format!("rank {rank}")}
    });
    let threads = (0..tracks as u64).map(|track| {
        let name =
            if track == 0 { format!("lane {lane}") } else { format!("lane {lane}, overlapping") };
        let thread = u64::from(lane) * TRACKS + track;
        json!({
            "ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": name}
        })
    });
    let order = json!({
        "ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}
    });
    let heads = if lane == 0 { vec![process, order] } else { Vec::new() };
    heads.into_iter().chain(threads).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(rank: u32, lane: u32, name: &str, start_ns: f64, duration_ns: f64) -> TraceEvent {
        TraceEvent { rank, lane, name: name.to_owned(), start_ns, duration_ns }
    }

    #[test]
    fn a_rank_is_a_process_and_a_lane_a_thread() {
        let events = vec![
            event(1, 1, "wait", 500.0, 1500.0),
            event(0, 0, "put 0.0 input to 1", 0.0, 1000.0),
            event(0, 0, "put 0.0 input to 2", 500.0, 1000.0),
            event(0, 0, "signal", 1000.0, 0.0),
        ];
        insta::assert_snapshot!(render("all-gather \"x\"", events), @r#"
        {"displayTimeUnit":"ns","otherData":{"title":"all-gather \"x\""},"traceEvents":[
        {"args":{"name":"rank 0"},"name":"process_name","ph":"M","pid":0},
        {"args":{"sort_index":0},"name":"process_sort_index","ph":"M","pid":0},
        {"args":{"name":"lane 0"},"name":"thread_name","ph":"M","pid":0,"tid":0},
        {"args":{"name":"lane 0, overlapping"},"name":"thread_name","ph":"M","pid":0,"tid":1},
        {"args":{"name":"lane 1"},"name":"thread_name","ph":"M","pid":1,"tid":16},
        {"dur":1.0,"name":"put 0.0 input to 1","ph":"X","pid":0,"tid":0,"ts":0.0},
        {"dur":1.0,"name":"put 0.0 input to 2","ph":"X","pid":0,"tid":1,"ts":0.5},
        {"name":"signal","ph":"i","pid":0,"s":"t","tid":0,"ts":1.0},
        {"dur":1.5,"name":"wait","ph":"X","pid":1,"tid":16,"ts":0.5}
        ]}
        "#);
    }

    #[test]
    fn the_text_is_json() {
        let text = render("empty", Vec::new());
        let value: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(value["traceEvents"].as_array().map(Vec::len), Some(0));
    }

    #[test]
    fn slices_of_a_thread_do_not_overlap() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut random = || f64::from(rng.u32(0..100));
        let events: Vec<TraceEvent> =
            (0..200).map(|_| event(0, 0, "put", random() * 10.0, random() / 10.0)).collect();
        let value: Value = serde_json::from_str(&render("random", events)).unwrap();
        let mut ends: BTreeMap<u64, f64> = BTreeMap::new();
        for slice in value["traceEvents"].as_array().unwrap() {
            let Some(start) = slice["ts"].as_f64() else { continue };
            let end = ends.entry(slice["tid"].as_u64().unwrap()).or_default();
            assert!(start + 1e-9 >= *end, "{slice}");
            *end = start + slice["dur"].as_f64().unwrap_or(0.0);
        }
        assert!(ends.len() > 1);
    }
}
