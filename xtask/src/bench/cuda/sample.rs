//! One size of one run, as the program wrote it.

use serde::Deserialize;
use serde_json::Value;

use peerlane_rxe_vm::process::Outcome;

/// A line of JSON, read.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Sample {
    /// Which run it is of, such as `captured`.
    #[serde(skip)]
    pub(super) run: String,
    pub(super) ranks: usize,
    pub(super) total_bytes: u64,
    pub(super) outputs: u32,
    pub(super) in_place: bool,
    pub(super) captured: bool,
    pub(super) checked: bool,
    pub(super) median_us: f64,
    pub(super) busbw_gbs: f64,
    pub(super) host_us: f64,
    #[serde(default)]
    pub(super) limit_us: Option<f64>,
    #[serde(default)]
    pub(super) rivals_version: Option<String>,
    #[serde(default)]
    pub(super) rivals: Vec<Rival>,
    #[serde(default)]
    pub(super) beside: Vec<Beside>,
    /// All that the line holds.
    #[serde(skip)]
    pub(super) line: Value,
}

/// One of NCCL's paths.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Rival {
    pub(super) path: String,
    #[serde(default)]
    pub(super) rival_us: Option<f64>,
}

/// Gathers and compute beside each other.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Beside {
    pub(super) path: String,
    pub(super) compute_ratio: f64,
    pub(super) gather_ratio: f64,
    pub(super) gather_alone_us: f64,
    pub(super) gather_us: f64,
    pub(super) overlapped: bool,
}

impl Sample {
    /// Reads a line of the run of that name.
    pub(super) fn parse(run: &str, line: &str) -> Outcome<Self> {
        let value: Value = serde_json::from_str(line)?;
        let sample = Self::deserialize(&value)?;
        if !sample.checked {
            return Err("the bytes were not checked".into());
        }
        let (captured, in_place) = (run.starts_with("captured"), run.ends_with("in-place"));
        if (sample.captured, sample.in_place) != (captured, in_place) {
            return Err(format!("the line is of another run than {run}").into());
        }
        Ok(Self { run: run.to_owned(), line: value, ..sample })
    }

    /// The time of one of NCCL's paths.
    pub(super) fn rival_us(&self, path: &str) -> Option<f64> {
        self.rivals.iter().find(|rival| rival.path == path)?.rival_us
    }

    /// NCCL's best time.
    pub(super) fn best_us(&self) -> Option<f64> {
        self.rivals.iter().filter_map(|rival| rival.rival_us).min_by(f64::total_cmp)
    }

    /// How many times as fast ours is as `theirs`.
    pub(super) fn against(&self, theirs: Option<f64>) -> Option<f64> {
        theirs.map(|theirs| theirs / self.median_us)
    }

    /// The speed as a share of that of bare copies.
    pub(super) fn share(&self) -> Option<f64> {
        self.against(self.limit_us)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A sample such as a run of 4 ranks makes.
    pub(crate) fn sample(run: &str, total_bytes: u64, median_us: f64, more: &str) -> Sample {
        let line = format!(
            r#"{{"ranks":4,"total_bytes":{total_bytes},"outputs":1,"in_place":{},
            "captured":{},"checked":true,"median_us":{median_us},"busbw_gbs":1.5,"host_us":6.5{more}}}"#,
            run.ends_with("in-place"),
            run.starts_with("captured")
        );
        Sample::parse(run, &line).unwrap()
    }

    /// NCCL's three times.
    pub(crate) fn nccl(default: f64, symmetric: f64, copy_engines: f64) -> String {
        format!(
            r#","rivals":[{{"path":"default","rival_us":{default}}},
            {{"path":"symmetric","rival_us":{symmetric}}},
            {{"path":"copy engines","rival_us":{copy_engines}}}]"#
        )
    }

    #[test]
    fn a_line_is_read_with_what_it_may_lack() {
        let bare = sample("out-of-place", 8, 2.0, "");
        assert_eq!((bare.best_us(), bare.share()), (None, None));
        let full = sample("out-of-place", 8, 2.0, &(nccl(4.0, 3.0, 9.0) + r#","limit_us":1.0"#));
        assert_eq!((full.best_us(), full.share()), (Some(3.0), Some(0.5)));
        assert_eq!(full.against(full.rival_us("copy engines")), Some(4.5));
        assert_eq!(full.line["limit_us"], 1.0);
        assert!(Sample::parse("x", "{}").is_err());
    }
}
