"""Train an agent by PPO: rollouts with the policy's own samples, advantages, epochs of shuffled minibatches."""

import numpy as np
import torch
from torch import nn
from torch.distributions.categorical import Categorical

num_steps, num_envs, gamma, gae_lambda, clip_coef, ent_coef, vf_coef = 8, 4, 0.99, 0.95, 0.2, 0.01, 0.5


class Envs:
    """Points that are pushed left or right, and are rewarded near the middle."""

    def __init__(self):
        self.state = np.linspace(-1, 1, num_envs)[:, None] * np.array([[1.0, 0.1, -0.5]])

    def step(self, action):
        self.state[:, 1] += 0.1 * (2 * action - 1)
        self.state[:, 0] += self.state[:, 1]
        done = np.abs(self.state[:, 0]) > 2
        reward = 1.0 - np.abs(self.state[:, 0])
        self.state[done] = 0.1
        return self.state.copy(), reward, done


def layer_init(layer, std=2**0.5, bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = [layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 16)), nn.Tanh()]
        self.critic = nn.Sequential(*hidden, layer_init(nn.Linear(16, 1), std=1.0))
        hidden = [layer_init(nn.Linear(3, 16)), nn.Tanh(), layer_init(nn.Linear(16, 16)), nn.Tanh()]
        self.actor = nn.Sequential(*hidden, layer_init(nn.Linear(16, 2), std=0.01))

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


def ppo_loss(agent, obs, actions, old_logprob, advantages, returns):
    _, newlogprob, entropy, newvalue = agent.get_action_and_value(obs, actions.long())
    logratio = newlogprob - old_logprob
    ratio = logratio.exp()
    with torch.no_grad():
        approx_kl = ((ratio - 1) - logratio).mean()
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    pg_loss = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
    v_loss = 0.5 * ((newvalue.view(-1) - returns) ** 2).mean()
    return pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef, approx_kl


def main():
    np.random.seed(1)
    torch.manual_seed(1)
    envs, agent = Envs(), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    obs = torch.zeros(num_steps, num_envs, 3)
    actions, logprobs, rewards, dones, values = (torch.zeros(num_steps, num_envs) for _ in range(5))
    next_obs, next_done, log = torch.tensor(envs.state).to(obs), torch.zeros(num_envs), []
    for iteration in range(2):
        optimizer.param_groups[0]["lr"] = (1.0 - iteration / 2) * 2.5e-3
        for step in range(num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step], logprobs[step] = action, logprob
            state, reward, done = envs.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward).view(-1)
            next_obs, next_done = torch.tensor(state).to(obs), torch.tensor(done).to(obs)
        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages, lastgaelam = torch.zeros_like(rewards), 0
            for t in reversed(range(num_steps)):
                alive = 1.0 - (next_done if t == num_steps - 1 else dones[t + 1])
                nextvalues = next_value if t == num_steps - 1 else values[t + 1]
                delta = rewards[t] + gamma * nextvalues * alive - values[t]
                advantages[t] = lastgaelam = delta + gamma * gae_lambda * alive * lastgaelam
            returns = advantages + values
        b_inds = np.arange(num_steps * num_envs)
        flat = [each.reshape((-1, *each.shape[2:])) for each in (obs, actions, logprobs, advantages, returns)]
        for _ in range(2):
            np.random.shuffle(b_inds)
            for start in range(0, len(b_inds), 16):
                mb = b_inds[start : start + 16]
                loss, approx_kl = ppo_loss(agent, *(each[mb] for each in flat))
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                log += [loss.item(), approx_kl.item()]
        log.append(rewards.sum().item())
    torch.save(agent.state_dict(), "ckpt.pt")
    return log


if __name__ == "__main__":
    main()
