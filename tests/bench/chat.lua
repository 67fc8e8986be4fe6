-- What wrk sends: streaming chat requests whose text is new every time. Arguments: name=value after "--".
--
--   words=N   words in a prompt                              shared=N  how many of them come first and are common to many requests
--   groups=N  how many such common beginnings there are      tokens=N  max_tokens
--   delay=MS  mean pause of each connection between requests (0: none; drawn between half and one and a half)
--   seed=N    model=NAME

local set = { words = 400, shared = 0, groups = 8, tokens = 16, delay = 0, seed = 1, model = "bench" }
local fragments, beginnings = {}, {}

-- Words of two fragments out of 4,096: hardly one comes twice, so that no tokenizer's memory of words helps.
local function text(count)
  local chosen = {}
  for i = 1, count do chosen[i] = fragments[math.random(#fragments)] .. fragments[math.random(#fragments)] end
  return table.concat(chosen, " ")
end

function init(arguments)
  for _, argument in ipairs(arguments) do
    local name, value = argument:match("^(%w+)=(.*)$")
    if name then set[name] = tonumber(value) or value end
  end
  -- the fragments and the common beginnings are the same in every run, what follows is not
  math.randomseed(7)
  for i = 1, 4096 do
    local letters = {}
    for at = 1, math.random(2, 4) do letters[at] = string.char(math.random(97, 122)) end
    fragments[i] = table.concat(letters)
  end
  for group = 1, set.groups do beginnings[group] = text(set.shared) .. " " end
  math.randomseed(set.seed)
end

wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"

function request()
  local prompt = text(set.words - set.shared)
  if set.shared > 0 then prompt = beginnings[math.random(set.groups)] .. prompt end
  return wrk.format(nil, nil, nil, '{"model":"' .. set.model .. '","stream":true,"max_tokens":' .. set.tokens
    .. ',"messages":[{"role":"user","content":"' .. prompt .. '"}]}')
end

function delay()
  if set.delay == 0 then return 0 end
  return math.floor(set.delay * (0.5 + math.random()))
end

function done(summary, latency)
  local wrong = summary.errors
  io.write(string.format(
    '\nRESULT {"requests":%d,"seconds":%.6f,"bytes":%d,"p50_us":%.0f,"p90_us":%.0f,"p99_us":%.0f,"refused":%d,"broken":%d}\n',
    summary.requests, summary.duration / 1e6, summary.bytes, latency:percentile(50), latency:percentile(90), latency:percentile(99),
    wrong.status, wrong.connect + wrong.read + wrong.write + wrong.timeout))
end
