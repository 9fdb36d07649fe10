//! Reading what the programs in the guest print.

use serde::Deserialize;

use peerlane_rxe_vm::process::Outcome;

const MIB: f64 = (1 << 20) as f64;

/// A row of `peerlane perf`.
#[derive(Debug, Deserialize)]
pub(super) struct Perf {
    #[serde(default)]
    pub(super) gbs: Option<f64>,
    #[serde(default)]
    pub(super) median_us: Option<f64>,
    checked: bool,
}

/// A row of `peerlane allgather`, or of the program over Open MPI.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Gather {
    #[serde(default)]
    pub(super) algorithm: String,
    pub(super) total_bytes: u64,
    pub(super) median_us: f64,
    checked: bool,
}

trait Checked {
    fn is_checked(&self) -> bool;
}

impl Checked for Perf {
    fn is_checked(&self) -> bool {
        self.checked
    }
}

impl Checked for Gather {
    fn is_checked(&self) -> bool {
        self.checked
    }
}

fn rows<T: Checked + for<'a> Deserialize<'a>>(printed: &[String]) -> Outcome<Vec<T>> {
    // A message of Open MPI's own may end in a zero, which begins the next line then.
    let lines = printed.iter().map(|line| line.trim_start_matches(char::is_control));
    let lines = lines.filter(|line| line.starts_with('{'));
    let rows = lines.map(|line| serde_json::from_str(line)).collect::<Result<Vec<T>, _>>()?;
    if rows.is_empty() || !rows.iter().all(Checked::is_checked) {
        return Err(format!("wanted checked rows of JSON, saw:\n{}", printed.join("\n")).into());
    }
    Ok(rows)
}

/// The one row of `peerlane perf`.
pub(super) fn perf(printed: &[String]) -> Outcome<Perf> {
    let mut rows: Vec<Perf> = rows(printed)?;
    rows.pop().filter(|_| rows.is_empty()).ok_or_else(|| "wanted one row of perf".into())
}

/// The rows of all-gathers.
pub(super) fn gathers(printed: &[String]) -> Outcome<Vec<Gather>> {
    rows(printed)
}

/// What ib_write_bw calls average, in 10^9 bytes a second.
pub(super) fn perftest_gbs(printed: &[String], bytes: u64) -> Outcome<f64> {
    Ok(perftest(printed, bytes, 3)? * MIB / 1e9)
}

/// What ib_write_lat calls typical, which is the median, in µs.
pub(super) fn perftest_us(printed: &[String], bytes: u64) -> Outcome<f64> {
    perftest(printed, bytes, 4)
}

/// A column of the row of this size.
fn perftest(printed: &[String], bytes: u64, column: usize) -> Outcome<f64> {
    let size = bytes.to_string();
    let words = printed.iter().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = words.into_iter().find(|words| words.first() == Some(&size.as_str()));
    let figure = row.as_ref().and_then(|words| words.get(column)?.parse().ok());
    figure.ok_or_else(|| {
        format!(
            "there is no row of {bytes} bytes in what perftest printed:\n{}",
            printed.join("\n")
        )
        .into()
    })
}

/// Of each line that counts, what the two nodes had sent, and how often they had begun again.
pub(super) fn counts(printed: &[String]) -> Outcome<Vec<[u64; 4]>> {
    let counts = printed.iter().filter_map(|line| line.strip_prefix("sent "));
    let counts = counts.map(|line| {
        let numbers: Vec<u64> =
            line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        <[u64; 4]>::try_from(numbers).map_err(|_| format!("no four numbers: {line}").into())
    });
    counts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn tables_of_perftest_are_read() {
        let printed = lines(
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
             65536      500              75.50              62.50              0.001000\n",
        );
        assert!((perftest_gbs(&printed, 65536).unwrap() - 0.065_536).abs() < 1e-9);
        assert!(perftest_gbs(&printed, 8).is_err());
        let printed = lines(
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n \
             8       1000          50.71          4000.10      67.25              70.00\n",
        );
        assert!((perftest_us(&printed, 8).unwrap() - 67.25).abs() < 1e-9);
    }

    #[test]
    fn rows_must_be_checked() {
        let good = r#"{"total_bytes":8,"median_us":2.5,"checked":true,"algorithm":"direct"}"#;
        assert_eq!(gathers(&lines(good)).unwrap()[0].algorithm, "direct");
        assert!(gathers(&lines(&good.replace("true", "false"))).is_err());
        assert!(gathers(&lines("nothing")).is_err());
        assert_eq!(gathers(&lines(&format!("a warning\n\0{good}"))).unwrap().len(), 1);
        let rate = r#"{"gbs":0.5,"checked":true}"#;
        assert_eq!(perf(&lines(rate)).unwrap().gbs, Some(0.5));
        assert!(perf(&lines(&format!("{rate}\n{rate}"))).is_err());
    }

    #[test]
    fn counters_are_read() {
        let printed = lines("sent 10 20 0 1\nx\nsent 30 50 2 3");
        assert_eq!(counts(&printed).unwrap(), [[10, 20, 0, 1], [30, 50, 2, 3]]);
        assert!(counts(&lines("sent 10")).is_err());
    }
}
