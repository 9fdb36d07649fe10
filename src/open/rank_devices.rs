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
    /// The reasons why the rank has no device of a network, in the order of
    /// [`Backend::NETWORKS`]; `None` for a network that it has.
    ///
    /// Ranks exchange them only for networks that they may need, because a library of a network
    /// that nobody needs is not loaded.
    pub(super) lacks: [Option<String>; Backend::NETWORKS.len()],
    pub(super) requested: Option<Backend>,
    pub(super) requested_network: Option<Backend>,
    pub(super) host: String,
}

impl RankDevices {
    pub(super) fn from_survey(
        survey: &Survey,
        (requested, requested_network): (Option<Backend>, Option<Backend>),
        host: &str,
    ) -> Self {
        let names = |devices: &Result<Vec<Device>, NoGpus>| match devices {
            Ok(devices) => Ok(devices.iter().map(|device| device.name.clone()).collect()),
            Err(reason) => Err(reason.clone()),
        };
        let (cuda, rocm) = (names(&survey.cuda), names(&survey.rocm));
        let (lacks, host) = (unknown_networks(), host.to_owned());
        Self { cuda, rocm, lacks, requested, requested_network, host }
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

        for requested in [self.requested, self.requested_network] {
            writer = text(writer, requested.map_or("", Backend::name));
        }
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
                tag => return Err(wrong_tag(field, tag, "0, 1 or 2")),
            })
        };

        let (cuda, rocm) = (gpus(&mut reader, "cuda")?, gpus(&mut reader, "rocm")?);
        let mut requested = |field| match text(&mut reader, field)?.as_str() {
            "" => Ok::<_, Error>(None),
            name => Ok(Some(name.parse()?)),
        };
        let (requested, requested_network) = (requested("backend")?, requested("network")?);
        let host = String::from_utf8_lossy(reader.rest()).into_owned();
        let lacks = unknown_networks();
        Ok(Self { cuda, rocm, lacks, requested, requested_network, host })
    }

    /// Returns the GPUs of a GPU backend; `None` for other backends.
    pub(super) fn gpus(&self, backend: Backend) -> Option<&Result<Vec<String>, NoGpus>> {
        match backend {
            Backend::Cuda => Some(&self.cuda),
            Backend::Rocm => Some(&self.rocm),
            _ => None,
        }
    }

    /// Returns why the rank has no device of a GPU backend or a network; `None` if it has one, or
    /// the backend needs none.
    pub(super) fn reason_without(&self, backend: Backend) -> Option<String> {
        if let Some(gpus) = self.gpus(backend) {
            return gpus.as_ref().err().map(NoGpus::to_string);
        }
        let index = Backend::NETWORKS.iter().position(|network| *network == backend)?;
        self.lacks[index].clone()
    }

    /// Takes what the rank has sent of a network: the reason why it has no device, or nothing.
    pub(super) fn set_network(&mut self, network: Backend, reason: &[u8]) {
        let lacks = Backend::NETWORKS.iter().zip(&mut self.lacks);
        for (_, lack) in lacks.filter(|(other, _)| **other == network) {
            *lack = Some(String::from_utf8_lossy(reason).into_owned());
            lack.take_if(|reason| reason.is_empty());
        }
    }
}

fn unknown_networks() -> [Option<String>; Backend::NETWORKS.len()] {
    Backend::NETWORKS.map(|_| Some("it was not looked for".to_owned()))
}

fn wrong_tag(field: &str, tag: u32, expected: &str) -> Error {
    let text = format!("the tag of the field {field} is {tag}, expected {expected}");
    Error::new(ErrorKind::Mismatch, text)
}

/// Returns what a rank with `cuda` GPUs and a device of each of `networks` has found.
#[cfg(test)]
pub(super) fn found(host: &str, cuda: usize, networks: &[Backend]) -> RankDevices {
    let cuda = Ok((0..cuda).map(|number| format!("gpu{number}")).collect());
    let rocm = Err(NoGpus::Absent("the library is missing".to_owned()));
    let lacks = |network| format!("{network} is missing; install {network}");
    let lacks = Backend::NETWORKS
        .map(|network| Some(lacks(network)).filter(|_| !networks.contains(&network)));
    let (requested, requested_network) = (None, None);
    RankDevices { cuda, rocm, lacks, requested, requested_network, host: host.to_owned() }
}
