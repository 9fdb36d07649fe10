//! Lists the devices of a rank, as ranks send it to each other.

use peerlane_hal::wire::{Reader, Truncated, Writer};
use peerlane_hal::{ErrorKind, Rank};

use super::survey::{Backend, Device, NoGpus, Survey};
use crate::Error;

/// The devices that one rank has found, which ranks exchange before they choose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankDevices {
    /// The PCI addresses of the GPUs that the rank sees.
    pub(super) cuda: Result<Vec<String>, NoGpus>,
    pub(super) rocm: Result<Vec<String>, NoGpus>,
    /// The number of RDMA devices of the rank; 0 also if they cannot be used.
    pub(super) rdma: u32,
    pub(super) requested: Option<Backend>,
    pub(super) host: String,
}

impl RankDevices {
    pub(super) fn of(survey: &Survey, requested: Option<Backend>, host: &str) -> Self {
        let names = |devices: &Result<Vec<Device>, NoGpus>| match devices {
            Ok(devices) => Ok(devices.iter().map(|device| device.name.clone()).collect()),
            Err(reason) => Err(reason.clone()),
        };
        let rdma = survey.rdma.as_ref().map_or(0, |devices| Rank::at(devices.len()).0);
        let (cuda, rocm) = (names(&survey.cuda), names(&survey.rocm));
        Self { cuda, rocm, rdma, requested, host: host.to_owned() }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let text =
            |writer: Writer, text: &str| writer.u32(Rank::at(text.len()).0).bytes(text.as_bytes());
        let mut writer = Writer::new();
        for gpus in [&self.cuda, &self.rocm] {
            writer = match gpus {
                Ok(names) => {
                    let writer = writer.u32(0).u32(Rank::at(names.len()).0);
                    names.iter().fold(writer, |writer, name| text(writer, name))
                }
                Err(NoGpus::Absent(reason)) => text(writer.u32(1), reason),
                Err(NoGpus::Broken(reason)) => text(writer.u32(2), reason),
            };
        }
        let writer = text(writer.u32(self.rdma), self.requested.map_or("", Backend::name));
        writer.bytes(self.host.as_bytes()).finish()
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let truncated = |error: Truncated| Error::new(ErrorKind::Mismatch, error.to_string());
        let mut reader = Reader::new(bytes);
        let text = |reader: &mut Reader<'_>, field| {
            let length = reader.u32(field).map_err(truncated)? as usize;
            let bytes = reader.bytes(field, length).map_err(truncated)?;
            Ok::<_, Error>(String::from_utf8_lossy(bytes).into_owned())
        };
        let gpus = |reader: &mut Reader<'_>, field| {
            Ok::<_, Error>(match reader.u32(field).map_err(truncated)? {
                0 => {
                    let count = reader.u32(field).map_err(truncated)?;
                    let names = (0..count).map(|_| text(reader, field));
                    Ok(names.collect::<Result<_, Error>>()?)
                }
                1 => Err(NoGpus::Absent(text(reader, field)?)),
                2 => Err(NoGpus::Broken(text(reader, field)?)),
                tag => {
                    let text = format!("the tag of the field {field} is {tag}, expected 0, 1 or 2");
                    return Err(Error::new(ErrorKind::Mismatch, text));
                }
            })
        };
        let (cuda, rocm) = (gpus(&mut reader, "cuda")?, gpus(&mut reader, "rocm")?);
        let rdma = reader.u32("rdma").map_err(truncated)?;
        let requested = match text(&mut reader, "backend")?.as_str() {
            "" => None,
            name => Some(name.parse()?),
        };
        let host = String::from_utf8_lossy(reader.rest()).into_owned();
        Ok(Self { cuda, rocm, rdma, requested, host })
    }

    /// Returns the GPUs of a GPU backend; `None` for other backends.
    pub(super) fn gpus(&self, backend: Backend) -> Option<&Result<Vec<String>, NoGpus>> {
        match backend {
            Backend::Cuda => Some(&self.cuda),
            Backend::Rocm => Some(&self.rocm),
            _ => None,
        }
    }
}
